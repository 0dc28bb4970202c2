"""Every shipped scenario fails as it says and is cured as it says, through the real command line."""

import html
import io
import json
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command import Finished, dtypedoctor, forked, in_this_process, report_of
from recorded import NAMES, keep
from rich.console import Console
from snapshot import check_against_snapshot, entry, forget_others, read_snapshot

from dtypedoctor.lab.scenarios.loading import load_scenario
from dtypedoctor.redaction.redact import redact
from dtypedoctor.report.files import read_report
from dtypedoctor.report.formats import FORMATS, format_named
from dtypedoctor.report.run_document import public_run, run_document
from dtypedoctor.report.to_json import json_schema
from dtypedoctor.report.to_terminal import print_document

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
ALL = {path.stem: load_scenario(path) for path in sorted(SCENARIOS.glob("*.yaml"))}
FAILING = {name: scenario for name, scenario in ALL.items() if scenario.expect.findings and not scenario.expect.only_on}
ALWAYS = ("sequential_loads_bf16_fp16", "custom_model_rmsnorm_fp32", "gemma4_grpo_fp16")
"""Scenarios of three public tickets run by default: a silent failure, an exception, a training that overflows; the others, their variants and
controls before a release."""
SILENT = ("sequential_loads_bf16_fp16_autocast", "sequential_loads_fp16_bf16_autocast", "quant_state_float32")
FOLDERS = re.compile(
    "|".join(re.escape(str(folder)) for folder in {SCENARIOS.parent, Path(sys.prefix), Path.home()}) + "|/tmp/"
)
"""Absolute paths that belong to whoever runs the tests."""
STRICT = [name for name, scenario in FAILING.items() if "strict" in scenario.expect.not_cured_by]


def each(names: Iterable[str]) -> list[Any]:
    """Scenarios as parameters of a test."""
    return [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.release) for name in names]


@pytest.fixture(scope="session")
def chosen(request: pytest.FixtureRequest) -> list[str]:
    """The scenarios that the selected tests of this file are about; other files name scenarios too, and run none."""
    here = [item for item in request.session.items if item.path == Path(__file__) and hasattr(item, "callspec")]
    return sorted(ALL.keys() & {"gemma4_grpo_fp16", *(str(item.callspec.params.get("name")) for item in here)})


@pytest.fixture(scope="session")
def everything(chosen: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """One run of the chosen scenarios."""
    out = tmp_path_factory.mktemp("scenarios") / "out"
    return forked("run", *(SCENARIOS / f"{name}.yaml" for name in chosen), "--out", out), out


@pytest.fixture(scope="session")
def rows(everything: tuple[Finished, Path]) -> dict[str, dict[str, Any]]:
    """The matrix, by scenario."""
    document = json.loads((everything[1] / "matrix.json").read_text())
    return {row["scenario"]: row for row in document["rows"]}


def trials(everything: tuple[Finished, Path], name: str) -> dict[str, dict[str, Any]]:
    """The trials of a scenario, by remedy."""
    return {trial["remedy"]: trial for trial in report_of(everything[1] / name)["trials"]}


def test_the_command_exits_with_zero_and_prints_one_matrix(
    chosen: list[str], everything: tuple[Finished, Path]
) -> None:
    """All of them are as they say."""
    finished, _ = everything
    assert finished.code == 0, finished.out
    assert f"{len(chosen)} of {len(chosen)} scenarios as expected" in finished.out
    assert "Traceback" not in finished.err


@pytest.mark.parametrize("name", each(ALL))
def test_a_scenario_is_as_it_says(name: str, rows: dict[str, dict[str, Any]]) -> None:
    """Findings, the first one first, and what cures and what does not."""
    expect, row = ALL[name].expect, rows[name]
    assert (row["exit"], row["as_expected"]) == (0, True), row
    if name not in FAILING:
        return
    assert row["findings"][: len(expect.findings)] == expect.findings
    assert set(expect.cured_by) <= set(row["cured_by"])
    assert set(expect.not_cured_by) <= set(row["not_cured_by"])


@pytest.mark.parametrize("name", each(ALL))
def test_all_findings_and_trials_are_those_of_the_snapshot(
    name: str, rows: dict[str, dict[str, Any]], everything: tuple[Finished, Path], rewrite_snapshot: bool
) -> None:
    """All findings in their order, with severity, confidence and place, the status, the exit code and each remedy's outcome."""
    now = entry(report_of(everything[1] / name), rows[name]["exit"])
    check_against_snapshot("scenarios", name, now, rewrite=rewrite_snapshot)
    if rewrite_snapshot and name in NAMES:
        keep(name, everything[1] / name)


def test_the_snapshot_holds_no_other_scenario(rewrite_snapshot: bool) -> None:
    """A scenario that was removed or renamed leaves no entry behind."""
    if rewrite_snapshot:
        forget_others("scenarios", ALL)
    assert read_snapshot()["scenarios"].keys() <= ALL.keys()


@pytest.mark.parametrize("name", each(sorted(ALL.keys() - FAILING.keys())))
def test_a_control_yields_nothing(name: str, rows: dict[str, dict[str, Any]]) -> None:
    """No finding at all: a doctor who finds something in the healthy is of no use."""
    assert (rows[name]["status"], rows[name]["findings"], rows[name]["before"]) == ("healthy", [], "completed")


@pytest.mark.parametrize("name", each(FAILING))
def test_a_cause_is_proven_and_watching_does_not_change_the_run(
    name: str, rows: dict[str, dict[str, Any]], everything: tuple[Finished, Path]
) -> None:
    """A counterfactual settled the first finding; without the watch losses and parameters are bitwise equal, or the error is the same."""
    assert rows[name]["confidence"] == "proven", rows[name]["cause"]
    observer = report_of(everything[1] / name)["observer"]
    assert observer["bitwise_equal"] is True or (observer["bitwise_equal"] is None and observer["same_error"]), observer


@pytest.mark.parametrize("name", each(FAILING))
def test_a_cured_run_computes_what_float32_computes(name: str, everything: tuple[Finished, Path]) -> None:
    """All steps done, and the outputs are those of the float32 twin but for rounding."""
    scenario = FAILING[name]
    for remedy, trial in trials(everything, name).items():
        if remedy in scenario.expect.cured_by:
            assert trial["run"]["steps_completed"] == trial["run"]["steps_planned"]
            assert trial["output_error"] is not None
            assert trial["output_error"] < 0.05


@pytest.mark.parametrize("name", each(FAILING))
def test_a_cure_has_its_price_in_the_table(name: str, everything: tuple[Finished, Path]) -> None:
    """Step time and peak memory against the untreated run or the healthy one, the output error, and whether it is safe."""
    cures = [trial for trial in trials(everything, name).values() if trial["outcome"] == "fixed"]
    assert cures
    for trial in cures:
        assert trial["ratio_base"] in ("before", "reference")
        assert trial["step_time_ratio"] > 0
        assert trial["peak_memory_ratio"] > 0
        assert trial["output_error"] is not None
        assert isinstance(trial["safe"], bool)


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="with a CUDA device its streams are looked at")
@pytest.mark.parametrize("name", each(["nf4_dequant_streams"]))
def test_streams_are_said_to_be_not_covered_where_there_are_none(name: str, everything: tuple[Finished, Path]) -> None:
    """Once, although two workloads had launches to look at."""
    report = report_of(everything[1] / name)
    assert report["coverage"] == ["CUDA streams: there is no CUDA device here"]
    assert report["status"] == "healthy"


@pytest.mark.parametrize("name", each(SILENT))
def test_garbage_that_nothing_complains_about_is_found(
    name: str, rows: dict[str, dict[str, Any]], everything: tuple[Finished, Path]
) -> None:
    """The untreated run ends well and computes something else altogether; so do the runs with mere casts."""
    assert rows[name]["before"] == "completed"
    assert rows[name]["output_error"] > 0.5
    cast = trials(everything, name)["cast-after-dequantize"]
    assert cast["outcome"] == "not-fixed"
    assert cast["output_error"] > 0.5


@pytest.mark.parametrize("name", each(["sequential_loads_bf16_fp16", "sequential_loads_fp16_bf16"]))
def test_casting_the_stale_buffer_turns_an_exception_into_garbage(name: str, everything: tuple[Finished, Path]) -> None:
    """The run with the casts of the other ticket completes, and is called not fixed."""
    cast = trials(everything, name)["casts-forward-and-backward"]
    assert (cast["run"]["ended"], cast["outcome"], cast["safe"]) == ("completed", "not-fixed", False)
    assert cast["output_error"] > 0.5


@pytest.mark.parametrize("name", each(STRICT))
def test_strict_mode_raises_where_a_cast_would_have_hidden_it(name: str, everything: tuple[Finished, Path]) -> None:
    """The message names the dtypes that disagree."""
    trial = trials(everything, name)["strict"]
    assert (trial["outcome"], trial["as_intended"]) == ("not-fixed", True)
    assert trial["reason"].startswith("MixedDtypesError in step ")
    assert trial["reason"].endswith("A cast would have hidden it")


@pytest.mark.parametrize("name", each(ALL))
def test_the_report_of_a_scenario_renders_in_every_format(name: str, everything: tuple[Finished, Path]) -> None:
    """Each format holds the headline; JSON meets its schema, Markdown fits into one comment, nothing names this machine's folders."""
    directory = everything[1] / name
    jsonschema.validate(report_of(directory), json_schema())
    report = read_report(directory)
    written = {style: format_named(style).render(public_run(report)) for style in (one.name for one in FORMATS)}
    console = Console(file=io.StringIO(), width=80)
    print_document(run_document(redact(report)), console)
    written["terminal"] = console.file.getvalue()  # type: ignore[attr-defined]
    for style, text in written.items():
        words = html.unescape(text) if style in ("html", "junit") else text
        assert report.headline.split()[0].strip(".") in words, style
        assert not FOLDERS.search(text), (style, FOLDERS.search(text))
        assert "\x1b" not in text
    assert len(written["md"].encode()) < 65_536
    assert len(written["html"].encode()) < 2_000_000
    assert ET.fromstring(written["junit"]).get("failures") == "0"


@pytest.fixture(scope="session")
def gemma4(everything: tuple[Finished, Path]) -> Path:
    """The run of the Gemma-4 scenario."""
    return everything[1] / "gemma4_grpo_fp16"


@pytest.fixture(scope="session")
def gemma4_again(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """A second run with the same seed, alone, that stops after the diagnosis."""
    directory = tmp_path_factory.mktemp("gemma4") / "again"
    return in_this_process("run", "gemma4_grpo_fp16", "--no-remedies", "--out", directory), directory


def test_the_product_in_the_first_mlp_is_blamed_with_proof(gemma4: Path) -> None:
    """id, module, op, phase, step, source line, operands and the float32 replay are those of the ticket."""
    finding = report_of(gemma4)["findings"][0]
    assert finding["id"] == "float16-overflow"
    assert finding["fqn"].endswith("layers.0.mlp")
    assert finding["op"] == "aten.mul.Tensor"
    assert (finding["phase"], finding["step"]) == ("generate", 2)
    assert re.fullmatch(r"transformers/models/gemma4/modeling_gemma4\.py:\d+", finding["source"])
    assert finding["confidence"] == "proven"
    evidence = " ".join(finding["evidence"])
    assert "65,504" in evidence
    assert "float32 is finite" in evidence


def test_both_remedies_cure_and_their_costs_and_parity_are_stated(gemma4: Path) -> None:
    """Eight steps each, finite numbers, clamped elements counted, parity against the bfloat16 reference."""
    report = report_of(gemma4)
    trials = {t["remedy"]: t for t in report["trials"]}
    assert list(trials) == ["gemma4-mlp-float32-product", "bfloat16"]
    for trial in trials.values():
        assert trial["outcome"] == "fixed"
        assert trial["steps_completed"] == 8
        assert len(trial["loss"]) == 8
        assert all(value is not None for value in trial["loss"] + trial["grad_norm"])
        assert trial["step_time_ratio"] > 0
    corrected = trials["gemma4-mlp-float32-product"]
    assert corrected["parity"]["steps_compared"] == 8
    assert 0 < corrected["parity"]["max_kl"] < 1
    assert corrected["rescued_elements"] == 0
    assert trials["bfloat16"]["parity"]["total_kl"] == 0


@pytest.mark.release
def test_without_remedies_the_findings_remain(gemma4_again: tuple[Finished, Path]) -> None:
    """Exit 10, no trials, and plain text where stdout is no terminal."""
    finished, directory = gemma4_again
    assert finished.code == 10
    assert "float16-overflow" in finished.out or "float16 overflow" in finished.out
    assert "\x1b[" not in finished.out
    assert "Traceback" not in finished.err
    assert report_of(directory)["trials"] == []


@pytest.mark.parametrize("format", ["terminal", "md", "json"])
def test_a_finished_run_is_reported_again_without_torch(gemma4: Path, format: str) -> None:
    """`report` renders what is on disk and imports nothing heavy."""
    finished = dtypedoctor("report", gemma4, "--format", format, PYTHONPROFILEIMPORTTIME="1")
    assert finished.code == 0
    assert "float16-overflow" in finished.out
    assert _heavy_imports(finished.err) == []


def _heavy_imports(profile: str) -> list[str]:
    names = [line.rsplit("|", 1)[-1].strip() for line in profile.splitlines() if line.startswith("import time:")]
    assert len(names) > 20
    return [
        n
        for n in names
        if n.split(".")[0] in {"torch", "transformers", "numpy", "peft", "trl", "datasets", "bitsandbytes"}
    ]
