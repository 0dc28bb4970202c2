"""What the doctor does not do unless it is told to: run code that came as data, and write where it was not sent."""

import ast
import fcntl
import os
import stat
import tempfile
from functools import cache
from pathlib import Path

import pytest
from command import dtypedoctor

import dtypedoctor as package
from dtypedoctor.errors import UsageError
from dtypedoctor.lab.scenarios.loading import load_scenario

AUDITING = Path(__file__).with_name("auditing")
SCENARIO = """\
name: tiny
summary: A tiny Llama, trained for one step.
steps:
  - model: {name: "builtin:llama-tiny"}
    workload: {kind: train, steps: 1}
"""
SCRIPT = "import torch\nnet = torch.nn.Linear(4, 2)\nnet(torch.ones(2, 4)).sum().backward()\n"
FORBIDDEN = frozenset({"eval", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "pickle.load", "pickle.loads", "marshal.loads",
                       "joblib.load", "os.system"})  # fmt: skip
ARITHMETIC = "frames.py", "eval"
"""The one exception: arithmetic on plain numbers that the program has just computed itself, compiled from its own line without builtins."""
DEVICES = ("/dev/", "/proc/", "/sys/")


@cache
def calls() -> list[tuple[str, str, ast.Call]]:
    """Every call in the package: the file, the dotted name of what is called, and the call."""
    return [
        (f"{path.name}:{node.lineno}", ast.unparse(node.func), node)
        for path in sorted(Path(package.__file__).parent.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
    ]


def test_no_part_of_the_package_runs_what_it_reads() -> None:
    """No unsafe loader of YAML, no pickle, no shell: only torch.load, and that with weights_only."""
    found = [(place.partition(":")[0], name) for place, name, _ in calls() if name in FORBIDDEN]
    assert found == [ARITHMETIC]
    loads = [(place, node) for place, name, node in calls() if name in ("torch.load", "np.load", "numpy.load")]
    unsafe = [place for place, node in loads if not _is_true(node, "weights_only")]
    assert unsafe == []


def test_nothing_turns_on_the_code_of_a_model_repository() -> None:
    """``trust_remote_code`` is never passed as True."""
    assert [place for place, _, node in calls() if _is_true(node, "trust_remote_code")] == []
    assert [place for place, _, node in calls() if _is_true(node, "shell")] == []


def _is_true(node: ast.Call, keyword: str) -> bool:
    return any(k.arg == keyword and isinstance(k.value, ast.Constant) and k.value.value is True for k in node.keywords)


@pytest.mark.parametrize(
    "tag", ["!!python/object/apply:os.system [touch harmed]", "!!python/name:os.system", "!!python/module:os"]
)
def test_a_scenario_that_holds_code_is_refused(tag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tags that an unsafe loader would obey are mistakes like any other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(SCENARIO.replace("A tiny Llama, trained for one step.", tag))
    with pytest.raises(UsageError):
        load_scenario(tmp_path / "tiny.yaml")
    assert not (tmp_path / "harmed").exists()


def test_a_factory_is_imported_only_where_it_is_run(tmp_path: Path) -> None:
    """Reading, listing and checking a scenario that names one leaves its module alone; running it is what it is named for."""
    (tmp_path / "harm.py").write_text("from pathlib import Path\nPath('harmed').touch()\n")
    (tmp_path / "tiny.yaml").write_text(SCENARIO.replace("builtin:llama-tiny", "harm:model"))
    load_scenario(tmp_path / "tiny.yaml")
    dtypedoctor("scenarios", cwd=tmp_path)
    dtypedoctor("report", tmp_path, cwd=tmp_path)
    assert not (tmp_path / "harmed").exists()


def written(work: Path, *arguments: str | Path) -> set[Path]:
    """Every place where ``dtypedoctor ARGUMENTS``, or a process that it starts, wrote something that is there afterwards."""
    log = work.parent / "audit.log"
    path = os.pathsep.join([str(AUDITING), os.environ.get("PYTHONPATH", "")])
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(work.parent / "torch"), "PYTHONDONTWRITEBYTECODE": "1"}
    finished = dtypedoctor(*arguments, cwd=work, AUDIT_LOG=str(log), PYTHONPATH=path, **caches)
    assert finished.code in (0, 10), finished.err
    with log.open() as lines:
        # the workers' server ends after the command, and then removes what torch 2.9 has made
        fcntl.flock(lines, fcntl.LOCK_EX)
        places = {Path(line) for line in lines.read().splitlines() if not line.startswith(DEVICES)}
    return {place for place in places if place.exists() and place != log}


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("verb", ["exec", "run"])
def test_nothing_is_written_outside_of_the_run_directory(verb: str, tmp_path: Path) -> None:
    """By the doctor and by every worker, seen by an audit hook in each of them; what is made for a moment is gone afterwards."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "tiny.yaml").write_text(SCENARIO)
    (work / "script.py").write_text(SCRIPT)
    what = ("run", "--no-remedies") if verb == "run" else ("exec",)
    found = written(work, *what, "--out", work / "out", "tiny.yaml" if verb == "run" else "script.py")
    elsewhere = {place for place in found if not place.is_relative_to(work / "out")}
    # torch's own cache, where its folder stands, and where the private folder stood in which a script is recorded
    assert elsewhere <= {Path(tempfile.gettempdir()), tmp_path / "torch", Path("/var/tmp")}
    assert work / "out" / "report.json" in found


def test_files_are_made_as_the_users_mask_says(tmp_path: Path) -> None:
    """No file is more open than the user has set, and none is closed that the user leaves open."""
    mask = 0o027
    (tmp_path / "script.py").write_text(SCRIPT)
    before = os.umask(mask)
    try:
        finished = dtypedoctor("exec", "--out", tmp_path / "out", tmp_path / "script.py")
    finally:
        os.umask(before)
    assert finished.code == 0, finished.err
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert {"events.jsonl", "cursor.bin", "report.json"} <= modes.keys()
    assert {name: oct(mode) for name, mode in modes.items() if mode != 0o666 & ~mask} == {}
