"""A script that fails with its secrets and its data in the message: they are in its own output, and nowhere else."""

import os
from pathlib import Path

import pytest
from command import forked as dtypedoctor

SCRIPT = """\
import os, sys
import torch

net = torch.nn.Linear(4, 2)
net(torch.ones(2, 4)).sum().backward()
os.environ["LATE_PASSWORD"] = "gravel-piano"
batch = {"text": "Patient Jane Doe has pneumonia", "ids": [1, 2, 3]}
print("using", os.environ["MY_SERVICE_KEY"], sys.argv[2])
print("then", "hf_" + "AbCdEfGhIj" * 3 + "KlMn", file=sys.stderr)
raise ValueError(f"no tensor of {batch!r} with {os.environ['MY_SERVICE_KEY']} {sys.argv[2]} gravel-piano step {7}")
"""
SECRETS = ("velvet-otter", "marble-arch", "river-stone", "gravel-piano", "hf_AbCd", "Jane", "pneumonia")


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of its run."""
    place = tmp_path_factory.mktemp("script")
    (place / "train.py").write_text(SCRIPT)
    arguments = ("train.py", "-p", "marble-arch", "--user=bob:river-stone")
    finished = dtypedoctor("exec", "--out", "run", *arguments, cwd=place, MY_SERVICE_KEY="velvet-otter")
    assert finished.code == 10, finished.err
    assert "using velvet-otter marble-arch" in finished.out  # the script has what was typed, and its output is its own
    return place / "run"


def test_secrets_of_a_script_stand_in_no_file_of_its_run(left: Path) -> None:
    """What it prints is not kept, and nothing private is left over."""
    files = [path for path in left.rglob("*") if path.is_file()]
    held = {path.name: [s for s in SECRETS if s in path.read_text(errors="replace")] for path in files}
    assert {name: found for name, found in held.items() if found} == {}
    assert not list(left.rglob("request.private.json"))


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("format", ["md", "html", "json", "junit", "sarif", "terminal"])
def test_no_format_holds_them_wherever_it_is_made(format: str, left: Path) -> None:
    """Rendered from the report, and from the trace alone, by a process that knows none of them."""
    for place in (left, left / "before"):
        shown = dtypedoctor("report", place, "--format", format)
        assert shown.code == 0, shown.err
        assert [s for s in SECRETS if s in shown.out + shown.err] == []
    assert os.environ.get("MY_SERVICE_KEY") is None
