"""`dtypedoctor bisect` finds the smallest culprit of real models through the real command line."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from command import Finished, in_this_process, report_of
from patience import PATIENCE, becomes

from dtypedoctor.report.files import read_report
from dtypedoctor.report.formats import format_named
from dtypedoctor.report.run_document import public_run
from dtypedoctor.report.to_json import json_schema

MLP = "base_model.model.model.layers.0.mlp::self"
HERE = Path(__file__).parent


def lines_of(directory: Path, event: str) -> list[dict[str, Any]]:
    log = (directory / "bisection.jsonl").read_text().splitlines()
    return [entry for line in log if (entry := json.loads(line)).get("event") == event]


def assert_reproduction_fails_as_it_says(directory: Path, elsewhere: Path) -> None:
    """Copied elsewhere and run in a fresh interpreter that cannot import this package, the script says the same again."""
    said = report_of(directory)["bisection"]["reproduction"]["said"]
    elsewhere.mkdir()
    for name in ("repro.py", "repro.safetensors"):
        shutil.copyfile(directory / name, elsewhere / name)
    assert "dtypedoctor" not in (elsewhere / "repro.py").read_text()
    done = subprocess.run(
        [sys.executable, "repro.py"],
        cwd=elsewhere,
        env=os.environ | {"PYTHONPATH": str(HERE)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert said.startswith("FAILS")
    assert said in done.stdout.splitlines()
    assert (elsewhere / "repro.safetensors").stat().st_size <= 1_000_000


@pytest.fixture
def bisect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Finished]:
    """`dtypedoctor bisect` in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (HERE, *sys.path))))
    return partial(in_this_process, "bisect")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """The bisection of a model whose second block overflows, once for all tests of it."""
    directory = tmp_path_factory.mktemp("bisect") / "small"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (HERE, *sys.path))))
        return in_this_process("bisect", "--model", "bisect_factories:overflowing", "--out", directory), directory


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """The bisection of the tiny Gemma-4, once for all tests of it."""
    directory = tmp_path_factory.mktemp("bisect") / "gemma"
    return in_this_process("bisect", "--model", "builtin:gemma4-tiny", "--out", directory), directory


def test_a_block_that_overflows_is_the_one_culprit(small: tuple[Finished, Path]) -> None:
    """Its own operators, proven 1-minimal and confirmed on the whole run; float16 is what fails, and compiled code fails too."""
    finished, directory = small
    assert finished.code == 10, finished.err
    found = report_of(directory)["bisection"]
    assert found["culprits"] == ["blocks.1::self"]
    assert (found["one_minimal"], found["confirmed"], found["flaky"], found["candidates"]) == (True, True, [], 7)
    assert finished.out.startswith("Smallest fix: keep blocks.1's own operators in float32.")
    verdicts = {verdict["mode"]: verdict["outcome"] for verdict in found["verdicts"]}
    assert {mode for mode, outcome in verdicts.items() if outcome == "pass"} == {
        "float32 throughout", "model in bfloat16", "bfloat16 autocast", "culprits in float32",
    }  # fmt: skip
    assert verdicts["compiled (inductor)"] == "fail"


@pytest.mark.release
def test_gemma4_has_one_culprit_the_product_in_its_first_mlp(gemma: tuple[Finished, Path]) -> None:
    """One leaf of 44, proven 1-minimal, confirmed on the whole run, and one correction does the same."""
    finished, directory = gemma
    assert finished.code == 10, finished.err
    found = report_of(directory)["bisection"]
    assert found["culprits"] == [MLP]
    assert found["corrections"] == ["gemma4-mlp-float32-product"]
    assert found["one_minimal"]
    assert found["confirmed"]
    assert not found["flaky"]
    assert found["remedy"] == {"corrections": [{"id": "gemma4-mlp-float32-product"}]}
    assert found["candidates"] == 44
    assert finished.out.startswith("Smallest fix: keep layers.0.mlp's own operators in float32.")


@pytest.mark.release
def test_the_verdict_table_of_gemma4_separates_the_modes(gemma: tuple[Finished, Path]) -> None:
    """It is float16's range in the forward pass: no matter of attention, compiler, loss scale or backward pass."""
    verdicts = {v["mode"]: v for v in report_of(gemma[1])["bisection"]["verdicts"]}
    passing = {name for name, verdict in verdicts.items() if verdict["outcome"] == "pass"}
    assert passing == {
        "float32 throughout",
        "model in bfloat16",
        "bfloat16 autocast",
        "culprits in float32",
        "compiled (aot_eager, layer by layer), culprits in float32",
    }
    failing = [verdict for name, verdict in verdicts.items() if name not in passing]
    assert {verdict["outcome"] for verdict in failing} == {"fail"}
    assert {verdict["phase"] for verdict in failing} == {"forward", "generate"}
    assert {verdict["fqn"] for verdict in failing if not verdict["mode"].startswith("compiled")} == {MLP}
    assert verdicts["8 steps of GRPO"]["step"] == 2
    assert verdicts["compiled (inductor)"]["fqn"] == "", "nothing inside is watched"
    assert verdicts["compiled (aot_eager, layer by layer), culprits in float32"]["absmax"] > 1000
    assert verdicts["float32 throughout"]["absmax"] > 65504


def test_progress_is_one_line_a_probe_when_piped(small: tuple[Finished, Path]) -> None:
    """Outcome, what was treated, peak and time on stderr; the answer alone on stdout."""
    finished, directory = small
    told = [line for line in finished.err.splitlines() if line.startswith(("  pass", "  fail"))]
    assert len(told) >= len(lines_of(directory, "probe"))
    assert all(" peak " in line and line.split()[-1] for line in told)
    assert not [line for line in told if line in finished.out]


def test_every_format_tells_the_answer(small: tuple[Finished, Path]) -> None:
    """And report.json keeps its contract."""
    jsonschema.validate(report_of(small[1]), json_schema())
    report = read_report(small[1])
    for name in ("md", "html"):
        text = format_named(name).render(public_run(report))
        assert "blocks.1::self" in text
        assert "compiled (inductor)" in text
        assert "repro.py" in text
    assert in_this_process("report", small[1]).out.count("verdict of each mode") == 1


def test_the_reproduction_fails_as_it_says(small: tuple[Finished, Path], tmp_path: Path) -> None:
    """A script with torch alone, and the tensors that it needs."""
    assert_reproduction_fails_as_it_says(small[1], tmp_path / "elsewhere")


@pytest.mark.release
def test_the_reproduction_of_gemma4_fails_as_it_says(gemma: tuple[Finished, Path], tmp_path: Path) -> None:
    """With torch and transformers alone."""
    assert_reproduction_fails_as_it_says(gemma[1], tmp_path / "elsewhere")


def _killed_after(probes: int, directory: Path, *arguments: str, by: signal.Signals) -> subprocess.Popen[str]:
    """A bisection that got a signal after so many probes."""
    # A shell that runs this in the background has it ignore SIGINT, which children inherit.
    start = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from dtypedoctor.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", start, "bisect", *arguments, "--out", str(directory)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = directory / "bisection.jsonl"
    enough = lambda: log.exists() and len(lines_of(directory, "probe")) >= probes
    assert becomes(lambda: process.poll() is not None or enough())
    assert process.poll() is None, process.communicate()
    process.send_signal(by)
    return process


@pytest.mark.release
def test_a_killed_bisection_goes_on_and_repeats_no_run(tmp_path: Path) -> None:
    """Of four corrections the MLP's alone is needed, and that is found across a SIGKILL in the middle."""
    directory = tmp_path / "run"
    _killed_after(5, directory, "gemma4_four_patches", by=signal.SIGKILL).communicate()
    before = {entry["place"] for entry in lines_of(directory, "run")}
    resumed = in_this_process("bisect", "--resume", directory, "--allow-code")
    assert resumed.code == 10, resumed.err
    found = report_of(directory)["bisection"]
    assert found["culprits"] == [MLP]
    assert found["corrections"] == ["gemma4-mlp-float32-product"]
    assert len(found["offered"]) == 4
    assert found["one_minimal"]
    places = [entry["place"] for entry in lines_of(directory, "run")]
    assert before < set(places)
    assert len(places) == len(set(places)), "a run was made twice"
    assert " (known)" in resumed.err


@pytest.mark.release
@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_with_the_best_answer_so_far(tmp_path: Path, by: signal.Signals) -> None:
    """Exit 10, a report that says so, and the command that goes on: after Ctrl-C, and after what ``timeout`` and job schedulers send."""
    directory = tmp_path / "run"
    process = _killed_after(4, directory, "--model", "bisect_factories:slow", by=by)
    out, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 10, err
    assert "Traceback" not in err
    assert out.startswith("Interrupted. Keeping ")
    assert f"dtypedoctor bisect --resume {directory}" in out
    found = report_of(directory)["bisection"]
    assert found["end"] == "interrupted"
    assert any("blocks.6" in name for name in found["culprits"])


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("model", "code", "end", "says"),
    [
        ("bisect_factories:healthy", 0, "healthy", "No failure: everything is finite"),
        ("builtin:llama-tiny", 0, "healthy", "No failure: everything is finite"),
        ("bisect_factories:nearly", 0, "healthy", "blocks.1.clamp reaches 60,000, 92% of its dtype's max."),
        ("bisect_factories:rescued", 0, "healthy", "within rounding of float32. Notes: float16-overflow."),
        ("bisect_factories:weights_too_large", 10, "rounded-weights", "Rounding the weights breaks the model"),
        ("bisect_factories:domain", 10, "domain-error", "domain-error: it fails in float32 too"),
        ("bisect_factories:untouchable", 10, "unresolved", "somebody has replaced my forward"),
        ("factories:killed", 10, "domain-error", "It fails in float32 too"),
    ],
)
def test_what_has_no_culprit_says_why(
    bisect: Callable[..., Finished], tmp_path: Path, model: str, code: int, end: str, says: str
) -> None:
    """In one sentence, early, and with a report."""
    finished = bisect("--model", model, "--out", "run")
    assert finished.code == code, finished.err
    assert "".join(says.split()) in "".join(finished.out.split())  # lines are broken at spaces and after hyphens
    found = report_of(tmp_path / "run")["bisection"]
    assert found["end"] == end
    assert found["culprits"] == []
    assert found["probes"] <= 2


@pytest.mark.release
def test_what_no_bisection_can_look_for_counts_all_the_same(bisect: Callable[..., Finished], tmp_path: Path) -> None:
    """A training whose updates are lost in bfloat16 has right outputs, and does not end with 0."""
    given = ("--dtype", "bfloat16", "--workload", "train", "--out", "run")
    finished = bisect("--model", "bisect_factories:stalling", *given)
    assert finished.code == 10, finished.out
    assert "Bisection cannot search for what else is found: update-stall" in finished.said
    assert report_of(tmp_path / "run")["bisection"]["end"] == "healthy"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "pass either SCENARIO or --model"),
        (["gemma4_grpo_fp16", "--model", "builtin:gemma4-tiny"], "pass either SCENARIO or --model"),
        (["gemma4_grpo_fp16", "--workload", "train"], "--workload needs --model"),
        (["--model", "factories:raises"], "the weights are in another castle"),
        (["--model", "factories:not_a_model"], "returned str, not a torch.nn.Module"),
        (["--model", "bisect_factories:does_not_fit"], "was killed by SIGKILL (often: out of memory)"),
        (["--model", "no-such/model"], "neither a directory nor a model in the Hugging Face cache"),
        (["--model", "empty"], "cannot load the folder 'empty'"),
        (["--model", "builtin:gemma4-tiny", "--dtype", "float61"], "--dtype"),
        (["--model", "builtin:gemma4-tiny", "--tolerance", "-1"], "--tolerance must be a number above 0"),
        (["--model", "builtin:gemma4-tiny", "--tolerance", "nan"], "--tolerance must be a number above 0"),
        (["--model", "builtin:gemma4-tiny", "--out", "empty"], "already exists"),
        (["--resume", "empty"], "no bisection to resume here"),
        (["--resume", "empty", "--dtype", "float16"], "--resume continues with the original options"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_message_and_exit_2(
    bisect: Callable[..., Finished], arguments: list[str], message: str
) -> None:
    """No traceback, and no run directory is left behind in which nothing was run."""
    Path("empty").mkdir()
    finished = bisect(*arguments)
    assert finished.code == 2
    assert message in finished.err
    assert "Traceback" not in finished.err
    assert finished.out == ""
    assert {path.name for path in Path().iterdir()} - {"runs"} == {"empty"}
    assert not list(itertools.chain.from_iterable(path.iterdir() for path in Path().glob("runs")))


def test_a_worker_that_dies_before_there_is_a_model_ends_with_3(bisect: Callable[..., Finished]) -> None:
    """It says how it died, and leaves what there is to look at."""
    finished = bisect("--model", "bisect_factories:crashes_early", "--out", "run")
    assert finished.code == 3
    assert "was killed by SIGSEGV" in finished.err
    assert Path("run").is_dir()
