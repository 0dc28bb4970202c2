"""Several scenarios in one command, through the real command line."""

import json
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from command import Finished, in_this_process, report_of
from patience import PATIENCE, becomes

HEALTHY = """\
name: NAME
summary: A forward pass in float32.
steps:
  - model: {name: "builtin:llama-tiny"}
    workload: {kind: forward}
"""

FAILING = """\
name: NAME
summary: Float32 norms in a bfloat16 model.
steps:
  - model: {name: "builtin:custom-moe", dtype: bfloat16}
    workload: {kind: forward, backward: true, steps: 3}
remedies: [norm-output-cast]
"""

UNMET = HEALTHY + "expect: {findings: [float16-overflow], cured_by: [bfloat16]}\n"

REFUSED = """\
name: NAME
summary: A model that cannot generate.
steps:
  - model: {name: "builtin:nf4-compiled"}
    workload: {kind: generate}
"""


def folder(directory: Path, **texts: str) -> Path:
    """A folder of scenarios, each in the file of its name."""
    directory.mkdir()
    for name, text in texts.items():
        (directory / f"{name}.yaml").write_text(text.replace("NAME", name))
    return directory


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """One run of a folder that holds one scenario of each kind."""
    place = tmp_path_factory.mktemp("many")
    scenarios = folder(place / "scenarios", b_unmet=UNMET, a_failing=FAILING, c_refused=REFUSED, d_healthy=HEALTHY)
    return in_this_process("run", scenarios, "--out", place / "out"), place / "out"


def test_each_scenario_has_a_folder_of_its_own_and_a_row(mixed: tuple[Finished, Path]) -> None:
    """Sorted by name; the refused one is a row with the reason, and its folder is gone."""
    finished, out = mixed
    rows = json.loads((out / "matrix.json").read_text())["rows"]
    assert [row["scenario"] for row in rows] == ["a_failing", "b_unmet", "c_refused", "d_healthy"]
    assert [row["as_expected"] for row in rows] == [False, False, False, True]
    assert [row["exit"] for row in rows] == [10, 10, 2, 0]
    assert rows[2]["cause"].startswith("Nf4CompiledForCausalLM has no generate")
    for row in rows:
        assert (out / row["scenario"]).exists() == (row["report"] is not None)
    assert report_of(out / "a_failing")["trials"][0]["remedy"] == "norm-output-cast"
    assert rows[0]["cured_by"] == ["norm-output-cast"]
    assert "Traceback" not in finished.err


def test_the_command_exits_with_the_gravest_code(mixed: tuple[Finished, Path]) -> None:
    """A refused scenario outweighs findings; the matrix carries the same number."""
    finished, out = mixed
    assert finished.code == 2
    assert json.loads((out / "matrix.json").read_text())["exit"] == 2


def test_one_matrix_is_printed_and_progress_goes_to_stderr(mixed: tuple[Finished, Path]) -> None:
    """One line of progress per scenario, none per run."""
    finished, _ = mixed
    assert "1 of 4 scenarios as expected" in finished.out
    assert re.search(r"fixed by +norm-output-cast", finished.out)
    progress = [line for line in finished.err.splitlines() if line[:1].isdigit()]
    assert [line.split()[0] for line in progress] == ["1/4", "2/4", "3/4", "4/4"]


def test_two_healthy_files_exit_with_zero(tmp_path: Path) -> None:
    """Files and names may be mixed with folders; stdout holds the JUnit document and nothing else."""
    one, two = folder(tmp_path / "one", first=HEALTHY), folder(tmp_path / "two", second=HEALTHY)
    finished = in_this_process("run", one / "first.yaml", two, "--out", tmp_path / "out", "--format", "junit")
    assert finished.code == 0, finished.err
    root = ET.fromstring(finished.out)
    assert [suite.get("name") for suite in root] == ["first", "second"]
    assert (root.get("failures"), root.get("errors")) == ("0", "0")
    assert "2 of 2 scenarios as expected" in in_this_process("report", tmp_path / "out").out


def test_a_finished_matrix_is_a_gate_in_the_formats_of_a_ci(mixed: tuple[Finished, Path]) -> None:
    """One suite per scenario: unexpected findings and unmet expectations fail, a refused scenario is an error."""
    _, out = mixed
    junit = in_this_process("report", out, "--format", "junit")
    suites = {suite.get("name"): suite for suite in ET.fromstring(junit.out)}
    assert list(suites) == ["a_failing", "b_unmet", "c_refused", "d_healthy"]
    counts = {name: (suite.get("failures"), suite.get("errors")) for name, suite in suites.items()}
    assert counts == {"a_failing": ("1", "0"), "b_unmet": ("1", "0"), "c_refused": ("0", "1"), "d_healthy": ("0", "0")}
    summary = in_this_process("report", out, "--format", "md").out
    assert [bool(re.search(rf"^\| `{name}` .* \*\*NO\*\* \|$", summary, re.MULTILINE)) for name in suites] == [
        True,
        True,
        True,
        False,
    ]


def test_several_scenarios_are_one_document_in_every_format(mixed: tuple[Finished, Path]) -> None:
    """The table is shown as it was; without a matrix the newest runs of the folder are listed."""
    _, out = mixed
    page = in_this_process("report", out, "--format", "html")
    assert (page.code, page.err) == (0, "")
    assert "1 of 4 scenarios as expected" in page.out
    assert "1 of 4 scenarios as expected" in in_this_process("report", out).out
    (out / "matrix.json").rename(out / "kept.json")
    try:
        listed = in_this_process("report", out)
        assert listed.code == 0, listed.err
        assert "The newest of the runs in" in listed.out
        (out / "matrix.json").write_text("[]")
        assert "not a matrix" in in_this_process("report", out).err
    finally:
        (out / "kept.json").replace(out / "matrix.json")


def test_what_cannot_be_read_is_said_before_anything_runs(tmp_path: Path) -> None:
    """A mistake in the last file costs no time in the first, and leaves no directory."""
    scenarios = folder(tmp_path / "scenarios", first=HEALTHY, second="name: second\n")
    finished = in_this_process("run", scenarios, "--out", tmp_path / "out")
    assert finished.code == 2
    assert "second.yaml:" in finished.err
    assert not (tmp_path / "out").exists()


def test_a_folder_without_scenarios_and_two_files_of_one_name_are_refused(tmp_path: Path) -> None:
    """One message each; the same file named twice is meant once."""
    empty = in_this_process("run", folder(tmp_path / "empty"), "--out", tmp_path / "out")
    assert (empty.code, "no scenarios here" in empty.err) == (2, True)
    one, other = folder(tmp_path / "one", first=HEALTHY), folder(tmp_path / "other", first=HEALTHY)
    twice = in_this_process("run", one, other, "--out", tmp_path / "out")
    assert (twice.code, "first: two files of this name" in twice.err) == (2, True)
    same = in_this_process("run", one, one / "first.yaml", "--no-remedies", "--out", tmp_path / "out")
    assert (same.code, "1 of 1 scenario as expected" in same.out) == (0, True)


def test_only_a_directory_of_several_scenarios_is_resumed(tmp_path: Path) -> None:
    """One message for anything else; nothing is made."""
    (tmp_path / "scenarios.jsonl").write_text("{}")
    for place in (tmp_path, tmp_path / "nowhere"):
        refused = in_this_process("run", "--resume", place)
        assert (refused.code, "no scenarios to resume here" in refused.err) == (2, True)
    both = in_this_process("run", "--resume", tmp_path, "--dtype", "float16")
    assert (both.code, "continues with the original options" in both.err) == (2, True)
    neither = in_this_process("run")
    assert (neither.code, "pass either SCENARIO or --resume" in neither.err) == (2, True)


SCRIPT = """\
name: {name}
summary: A script.
steps:
  - workload: {{kind: script, path: {name}.py}}
"""
COUNTING = """
import os, time
number = sum(name.startswith("{name}-run") for name in os.listdir(".")) + 1
os.mkdir(f"{name}-run{{number}}")
if number == {waits}:
    time.sleep(600)
"""


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("waits", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM)], ids=["first", "later"])
def test_a_signal_ends_the_command_whatever_run_of_a_script_it_meets(
    waits: int, number: signal.Signals, tmp_path: Path
) -> None:
    """The script that it interrupts is not judged, the next one is not started, and what is finished is written."""
    for name, wait in (("a_first", 0), ("b_waits", waits), ("c_last", 0)):
        (tmp_path / f"{name}.yaml").write_text(SCRIPT.format(name=name))
        (tmp_path / f"{name}.py").write_text(COUNTING.format(name=name, waits=wait))
    with (tmp_path / "err").open("wb") as err:
        started = subprocess.Popen(
            [sys.executable, "-m", "dtypedoctor", "run", ".", "--allow-code", "--out", "out"], cwd=tmp_path, stdout=err, stderr=err,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, start_new_session=True,
        )  # fmt: skip
    try:
        assert becomes(lambda: started.poll() is not None or (tmp_path / f"b_waits-run{waits}").exists())
        os.killpg(started.pid, number)
        started.wait(PATIENCE)
    finally:
        started.kill()
        started.wait()
    said = (tmp_path / "err").read_text()
    assert started.returncode == 130, said
    assert "Interrupted: 1 of 3 scenarios are finished." in said
    rows = json.loads((tmp_path / "out" / "matrix.json").read_text())["rows"]
    assert [row["status"] == "not run" for row in rows] == [False, True, True]
    assert not (tmp_path / "c_last-run1").exists()
