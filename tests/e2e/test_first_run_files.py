"""A second run of a script in the same directory leaves alone what the first one wrote: it neither resumes from it nor appends to it."""

import textwrap
from pathlib import Path

import pytest
from command import forked as dtypedoctor
from command import report_of

OVERFLOW = """
    import json, os, sys, torch

    class Square(torch.nn.Module):
        def forward(self, x):
            return x * x

    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), Square()).half()
    {begin}
    for step in range(start, start + 3):
        loss = net(torch.full((2, 4), 10.0 ** step, dtype=torch.float16)).mean()
        {end}
"""
"""Inf in its third step, where 1,000 times a weight is squared."""

RESUMES = {
    "a checkpoint": (
        "start = torch.load('state.pt')['step'] if os.path.exists('state.pt') else 1",
        "torch.save({'step': step + 1}, 'state.pt')",
    ),
    "a state in JSON": (
        "start = json.load(open('state.json')) if os.path.exists('state.json') else 1",
        "open('state.json', 'w').write(str(step + 1))",
    ),
    "a log": ("start = 1", "open('log.jsonl', 'a').write(json.dumps(step) + chr(10))"),
    "a log through os.open": (
        "start = 1",
        "os.write(os.open('log.txt', os.O_WRONLY | os.O_CREAT | os.O_APPEND), b'step')",
    ),
}
"""What a script reads or continues of an earlier run: how it begins, and what it does in each step."""

REPLACES = {
    "replaces its files": ("start = 1", "open('result.txt', 'w').write(str(step))"),
    "reads what it has written itself": (
        "start = 1",
        "torch.save(step, 'state.pt'); assert torch.load('state.pt') == step",
    ),
    "opens what is no file": (
        "start = 1; os.mkdir(f'gone{os.getpid()}'); os.chdir(f'gone{os.getpid()}'); os.rmdir(os.getcwd()); sys.audit('open', 'x')",
        """os.close(os.dup(1))
        try:
            open('a\\0b')
        except ValueError:
            pass""",
    ),
    "reads files that were there before": ("start = int(open('start.txt').read())", "pass"),
}


def written(folder: Path, begin: str, end: str) -> Path:
    """The script in a new folder."""
    folder.mkdir()
    (folder / "start.txt").write_text("1")
    script = folder / "train.py"
    script.write_text(textwrap.dedent(OVERFLOW.format(begin=begin, end=end)))
    return script


def files(folder: Path) -> dict[str, bytes]:
    """What stands in a folder, without what this package leaves there."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("begin", "end"), RESUMES.values(), ids=RESUMES)
def test_a_script_that_continues_is_not_continued(begin: str, end: str, tmp_path: Path) -> None:
    """Its files are those of one run; the finding is the first run's, and the report says why there is no second."""
    script = written(tmp_path / "program", begin, end)
    once = written(tmp_path / "once", begin, end)
    dtypedoctor("exec", "--out", tmp_path / "once-report", once, cwd=once.parent)
    finished = dtypedoctor(
        "exec", "--rerun", "--rerun-in-place", "--out", tmp_path / "report", script, cwd=script.parent
    )
    report = report_of(tmp_path / "report")
    assert finished.code == 10
    assert files(script.parent) == files(once.parent)
    assert [(one["id"], one["fqn"], one["step"]) for one in report["findings"]] == [("float16-overflow", "1", 3)]
    assert "written during its first run" in str(report["coverage"])


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("begin", "end"), REPLACES.values(), ids=REPLACES)
def test_a_script_that_begins_anew_is_run_again(begin: str, end: str, tmp_path: Path) -> None:
    """The run without instrumentation is not kept from the files that it begins anew."""
    script = written(tmp_path / "program", begin, end)
    dtypedoctor("exec", "--rerun", "--rerun-in-place", "--out", tmp_path / "report", script, cwd=script.parent)
    report = report_of(tmp_path / "report")
    assert [(one["id"], one["op"], one["confidence"]) for one in report["findings"]] == [
        ("float16-overflow", "aten.mul.Tensor", "proven")
    ]
    assert "written during its first run" not in str(report["coverage"])
