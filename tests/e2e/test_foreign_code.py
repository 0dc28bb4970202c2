"""A scenario or a run directory of somebody else's runs no code unless the user says so."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from command import in_this_process
from patience import read_to_end

from dtypedoctor.errors import UsageError
from dtypedoctor.lab.bisect.measurements import Asked, Journal
from dtypedoctor.lab.cli import scenario_files
from dtypedoctor.lab.cli.bisecting import Options, resumed_case
from dtypedoctor.lab.cli.scenario_files import load_checked
from dtypedoctor.lab.scenarios.loading import available, resolve

FACTORY = """\
name: foreign
summary: Runs a program.
steps:
  - model: {name: "subprocess:check_output", options: {args: [touch, PLACE/harmed]}}
    workload: {kind: forward}
"""
SCRIPT = """\
name: foreign
summary: Runs a script.
steps:
  - workload: {kind: script, path: PLACE/harm.py}
"""
HARM = "from pathlib import Path\nPath(__file__).with_name('harmed').touch()\n"


def foreign(place: Path, text: str) -> Path:
    """A scenario that leaves a file ``harmed`` in ``place``, which is made."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "harm.py").write_text(HARM)
    path = place / "foreign.yaml"
    path.write_text(text.replace("PLACE", str(place)))
    return path


@pytest.mark.parametrize(("text", "named"), [(FACTORY, "subprocess:check_output"), (SCRIPT, "harm.py")])
def test_code_that_a_strangers_scenario_names_is_not_run(text: str, named: str, tmp_path: Path) -> None:
    """Exit 2, what it would run and where it says so, and what to do; with the option it runs."""
    work = tmp_path / "work"
    work.mkdir()
    path = foreign(tmp_path / "downloads", text)
    for verb in ("run", "bisect"):
        refused = in_this_process(verb, path, "--out", work / verb, cwd=work)
        assert refused.code == 2, refused.err
        assert named in refused.err
        assert "steps[0]." in refused.err
        assert "--allow-code" in refused.err
        assert not (work / verb).exists()
    assert not (tmp_path / "downloads" / "harmed").exists()
    in_this_process("run", path, "--allow-code", "--no-remedies", "--out", work / "allowed", cwd=work)
    assert (tmp_path / "downloads" / "harmed").exists()


def test_a_capsule_as_the_model_of_a_strangers_scenario_is_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a file has its very name: the scenario may say that the capsule's code is allowed."""
    text = FACTORY.replace("subprocess:check_output", "capsule:evil").replace(
        "args: [touch, PLACE/harmed]", "allow_code: true"
    )
    path = foreign(tmp_path / "downloads", text)
    (tmp_path / "work" / "capsule:evil").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(UsageError, match=r"the capsule evil \(steps\[0\].model.name\)"):
        load_checked(path, allow_code=False)


def test_the_users_own_files_and_shipped_scenarios_need_no_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the working directory and the user's: no question. A link out of it, or another owner: a question."""
    monkeypatch.chdir(tmp_path)
    path = foreign(tmp_path / "scenarios", FACTORY)
    load_checked(path, allow_code=False)
    for shipped in available():
        load_checked(resolve(shipped.stem), allow_code=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "foreign.yaml").symlink_to(path)
    with pytest.raises(UsageError, match="subprocess:check_output"):
        load_checked(Path("foreign.yaml"), allow_code=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scenario_files.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(UsageError, match="subprocess:check_output"):
        load_checked(path, allow_code=False)


def test_a_strangers_run_directory_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds becomes a script that is run, whatever its scenario names."""
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "run"
    directory.mkdir()
    scenario = load_checked(resolve("gemma4_grpo_fp16"), allow_code=False)
    Journal(directory).begin(Asked(scenario=scenario, tolerance=None))
    assert resumed_case(directory, Options()).asked.scenario == scenario
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(UsageError, match="resuming runs code"):
        resumed_case(directory, Options())
    assert resumed_case(directory, Options(allow_code=True)).resumed


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("answer", "asked_again"), [("n\n", True), ("y\n", False)])
def test_a_person_at_a_terminal_is_asked(answer: str, asked_again: bool, tmp_path: Path) -> None:
    """What would run is named, and only a yes lets it; what reorders the line is spelt out."""
    path = foreign(tmp_path / "downloads", FACTORY.replace("subprocess:", "sub\\u202eprocess:"))
    program = (
        "from pathlib import Path; from dtypedoctor.lab.cli.scenario_files import load_checked; import sys\n"
        f"load_checked(Path({str(path)!r}), allow_code=False); print('went on')"
    )
    ours, theirs = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", program], stdin=theirs, stdout=theirs, stderr=theirs):
        os.close(theirs)
        os.write(ours, answer.encode())
        said = read_to_end(ours).decode()
    assert "Run it? [y/N]" in said
    assert "sub\\u202eprocess:check_output" in said
    assert "\u202e" not in said
    assert ("went on" not in said) is asked_again
