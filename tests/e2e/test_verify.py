"""`dtypedoctor verify`: the example of its page, its exit codes, its report, and the ways to name a live model."""

import json
import re
from pathlib import Path

import pytest
import torch
from command import Finished, forked, python
from torch import nn

import dtypedoctor as package

PAGE = (Path(__file__).parents[2] / "docs" / "verify.md").read_text(encoding="utf-8")
[EXAMPLE] = re.findall(r"<!-- fires -->\n```python\n(.+?)```", PAGE, re.DOTALL)
[SHOWN] = re.findall(r"```text\n(DIFFERS.+?)```", PAGE, re.DOTALL)
RENAMES = '    tensors["model.final_norm.weight"] = tensors.pop("model.norm.weight")\n'

NET = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), (torch.ones(3, 4),)

print("begins")
model, inputs = make()
if __name__ == "__main__":
    torch.save(model.state_dict(), "net.pt")
    print("saved")
"""


def verified(tmp_path: Path, source: str, *options: str | Path) -> Finished:
    (tmp_path / "model.py").write_text(source)
    return forked("verify", *options, cwd=tmp_path)


def test_the_example_of_the_page_fails_as_the_page_says(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(EXAMPLE)
    assert python("model.py", cwd=tmp_path).code == 0
    done = verified(tmp_path, EXAMPLE, "out", "--of", "model.py:trained")
    assert done.code == 10, done.err
    assert " ".join(SHOWN.split()) in " ".join(done.out.split())


@pytest.mark.release
def test_the_same_example_without_the_fault_is_the_same(tmp_path: Path) -> None:
    assert RENAMES in EXAMPLE
    (tmp_path / "model.py").write_text(EXAMPLE.replace(RENAMES, ""))
    assert python("model.py", cwd=tmp_path).code == 0
    done = verified(tmp_path, EXAMPLE, "out", "--of", "model.py:trained", "--format", "json")
    report = json.loads(done.out)
    assert (done.code, report["kind"], report["status"], report["verdict"]) == (0, "verification", "healthy", "same")
    assert f"SAME: {report['headline']}" in PAGE


def test_a_script_is_run_and_its_output_is_no_part_of_the_report(tmp_path: Path) -> None:
    """What it saves is compared with the model that it leaves in its variables."""
    done = verified(tmp_path, NET, "net.pt", "--of", "model.py", "--format", "json")
    assert (done.code, json.loads(done.out)["counts"]) == (0, {"identical": 4}), done.err
    assert "saved" in done.err


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("of", "words"),
    [
        (":::", ": no such file"),
        ("model.py:nothing", "has no 'nothing'"),
        ("other.py", "other.py: no such file"),
        ("nowhere", "nowhere: no such file or folder"),
    ],
)
def test_what_is_no_model_is_a_usage_error(of: str, words: str, tmp_path: Path) -> None:
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "net.pt")
    done = verified(tmp_path, NET, "net.pt", "--of", of)
    assert (done.code, words in done.err) == (2, True), done.err


@pytest.mark.release
def test_a_script_that_raises_leaves_no_verdict(tmp_path: Path) -> None:
    done = verified(tmp_path, NET.replace("model, inputs =", "1 / 0 ="), "net.pt", "--of", "model.py")
    assert done.code == 3, done.err
    assert "ZeroDivisionError" in done.err or "SyntaxError" in done.err


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("broken", ["def g(:\n", "def inner():\n    raise ValueError('no')\ninner()\n"])
@pytest.mark.parametrize("of", ["model.py", "model.py:model"])
def test_what_a_script_raises_is_shown_from_its_own_lines_on(broken: str, of: str, tmp_path: Path) -> None:
    """As Python shows it of the script alone."""
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "net.pt")
    done = verified(tmp_path, broken, "net.pt", "--of", of)
    assert done.code == 3, done.err
    assert 'model.py", line' in done.err
    assert "dtypedoctor/" not in done.err
    assert "runpy" not in done.err


def test_a_program_verifies_its_own_model(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    torch.save(model.state_dict(), tmp_path / "net.pt")
    assert package.verify_saved(tmp_path / "net.pt", model).verdict == "same"
    with torch.no_grad():
        model.bias.add_(1)
    [difference] = package.verify_saved(tmp_path / "net.pt", model).differences
    assert difference.tensor == "bias"
