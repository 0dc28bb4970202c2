"""``exec --fix``: a program is edited in a copy, finding after finding, until it runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command import dtypedoctor

TWO_IN_A_ROW = """\
import pathlib
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Linear(4, 4).to(torch.bfloat16)
head = nn.Linear(4, 1)
x = torch.tensor(eval(pathlib.Path(__file__).with_name("numbers.txt").read_text()))
h = net(x)
loss = head(h).mean()
loss.backward()
pathlib.Path("done.txt").write_text("done")
"""
"""Casting at one of the two calls leaves the other to fail."""

NO_EDIT = """\
import torch

torch.fft.rfft(torch.ones(5, dtype=torch.bfloat16).to_sparse().to_dense())[0].item().missing
"""


def written(folder: Path, source: str) -> Path:
    (folder / "numbers.txt").write_text("[[0.5, 1.0, -1.0, 2.0]]")
    script = folder / "train.py"
    script.write_text(source)
    return script


def test_two_mistakes_in_a_row_are_mended_in_a_copy(tmp_path: Path) -> None:
    """The patch cures the program that it was made of, whose folder nothing has changed until then."""
    script = written(tmp_path, TWO_IN_A_ROW)
    done = dtypedoctor("exec", "--fix", "--out", "run", "train.py", cwd=tmp_path)
    assert done.code == 0, done.err
    assert "FIXED: with 2 edits the program runs without a finding." in done.err
    assert script.read_text() == TWO_IN_A_ROW
    assert sorted(path.name for path in tmp_path.iterdir()) == ["numbers.txt", "run", "train.py"]
    patch = tmp_path / "run" / "fix.patch"
    assert patch.read_text() in done.out
    story = json.loads((tmp_path / "run" / "fix.json").read_text())
    assert story["healthy"]
    assert [one["where"] for one in story["tries"] if one["kept"]] == [["train.py:9"], ["train.py:10"]]
    assert not (tmp_path / "run" / "do-this.patch").exists()
    brief = json.loads(dtypedoctor("report", "run", "--format", "json", "--brief", cwd=tmp_path).out)
    assert brief["do_this"].startswith("FIXED: with 2 edits the program runs without a finding.")
    assert all(cast in brief["edit"] for cast in ("+h = net(x.to(torch.bfloat16))", "+loss = head("))
    follows, _, again = brief["next"].partition(" && ")
    assert follows == "patch -p0 < run/fix.patch"
    assert f"{follows} && " in done.err
    assert again.endswith("exec train.py")
    subprocess.run(follows, shell=True, cwd=tmp_path, check=True, capture_output=True)
    subprocess.run([sys.executable, "train.py"], cwd=tmp_path, check=True)


NEEDLESS = """\
import torch

HALF = torch.bfloat16
net = torch.nn.Linear(4, 1).to(HALF)
print(net(torch.ones(2, 4)).sum().item())
sigmas = torch.linspace(1.0, 0.003, 100, dtype=HALF)
times = 5 * sigmas / (1 + 4 * sigmas)
print(sum(int(torch.argmin((times - time).abs())) for time in times))
"""
"""The cast that the first failure needs is one to float32 once the second is mended."""


@pytest.mark.release
def test_an_edit_that_a_later_one_makes_needless_is_taken_back(tmp_path: Path) -> None:
    """The patch is the smallest with which the program is healthy."""
    written(tmp_path, NEEDLESS)
    done = dtypedoctor("exec", "--fix", "--out", "run", "train.py", cwd=tmp_path)
    assert "FIXED: with 1 edit the program runs without a finding." in done.err
    patch = (tmp_path / "run" / "fix.patch").read_text()
    assert [line for line in patch.splitlines() if line[:1] in "+-"][2:] == [
        "-HALF = torch.bfloat16",
        "+HALF = torch.float32",
    ]
    tries = json.loads((tmp_path / "run" / "fix.json").read_text())["tries"]
    assert [one["kept"] for one in tries] == [False, True]


@pytest.mark.release
def test_a_program_that_no_edit_helps_is_left_as_it_is(tmp_path: Path) -> None:
    """It is said so, and the command fails."""
    script = written(tmp_path, NO_EDIT)
    done = dtypedoctor("exec", "--fix", "--out", str(tmp_path / "run"), str(script), cwd=tmp_path)
    assert done.code == 10
    assert "NOT FIXED: " in done.err
    assert script.read_text() == NO_EDIT


@pytest.mark.release
def test_files_are_edited_in_place_in_a_clean_work_tree_alone(tmp_path: Path) -> None:
    """What is not committed could not be told from the edits."""
    script = written(tmp_path, TWO_IN_A_ROW)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    command = ("exec", "--fix", "--in-place", "--out", str(tmp_path.parent / f"{tmp_path.name}-run"), "train.py")
    refused = dtypedoctor(*command, cwd=tmp_path)
    assert refused.code == 2
    assert "not committed" in refused.err
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    done = dtypedoctor(*command, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "patch -p0" not in done.err, "the files have the edits already"
    assert "net(x.to(torch.bfloat16))" in script.read_text()


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("exec", "--in-place", "train.py"), "--in-place: without --fix no file is edited"),
        (("exec", "--fix", "--rerun", "train.py"), "--fix runs a program of files by itself"),
        (("exec", "--fix", "-c", "pass"), "--fix runs a program of files by itself"),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    """Nothing is run."""
    written(tmp_path, "open('ran', 'w')")
    refused = dtypedoctor(*words, cwd=tmp_path)
    assert refused.code == 2
    assert said in refused.err
    assert not (tmp_path / "ran").exists()


@pytest.mark.release
def test_a_signal_while_an_edit_is_tried_ends_the_command(tmp_path: Path) -> None:
    """No other edit is tried, and nothing of the program has changed."""
    waits = TWO_IN_A_ROW.replace("h = net(x)", "h = net(x)\nimport time; time.sleep(100)")
    script = written(tmp_path, waits)
    (tmp_path / "data").symlink_to("../elsewhere")
    running = subprocess.Popen(
        [sys.executable, "-m", "dtypedoctor", "exec", "--fix", "--out", tmp_path / "run", "train.py"],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert running.stderr is not None
    said = next(line for line in running.stderr if "(fix-1)" in line)
    time.sleep(8)  # until it waits; a signal before that ends it as well
    os.killpg(running.pid, signal.SIGINT)
    rest = running.communicate(timeout=60)[1]
    assert "running the script again" not in rest, said
    assert "NOT FIXED: a run was interrupted." in rest or running.returncode == 130
    assert script.read_text() == waits


@pytest.mark.release
def test_links_lead_to_where_they_did(tmp_path: Path) -> None:
    """A relative one that leads out of the folder would lead to nothing in a copy of it."""
    (tmp_path / "program").mkdir()
    (tmp_path / "numbers.txt").write_text("3")
    (tmp_path / "program" / "numbers.txt").symlink_to("../numbers.txt")
    script = tmp_path / "program" / "train.py"
    script.write_text("import torch\nprint('read', torch.ones(1).item() * int(open('numbers.txt').read()))")
    done = dtypedoctor("exec", "--fix", "--out", tmp_path / "run", "train.py", cwd=tmp_path / "program")
    assert "read 3.0" in done.out
    assert "HEALTHY: there is nothing to fix." in done.err
    assert done.code == 0
