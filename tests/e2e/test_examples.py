"""The projects under docs/examples, started as a user starts them."""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from command import Finished, dtypedoctor, python

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.release]


def project(name: str, tmp_path: Path) -> Path:
    """A copy of a project."""
    return Path(shutil.copytree(EXAMPLES / name, tmp_path / name))


def started(folder: Path, *words: str) -> Finished:
    """What ``python WORDS`` prints there, in a process of its own."""
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    return Finished(code=done.returncode, out=done.stdout, err=done.stderr)


def test_every_project_is_in_the_list() -> None:
    """Each folder has its line, which links a file of it."""
    text = (EXAMPLES / "README.md").read_text()
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
    assert {line.partition("[")[2].partition("]")[0] for line in text.splitlines() if line.startswith("| [")} == folders


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_a_tracker_gets_the_findings_beside_the_loss(tmp_path: Path) -> None:
    """The headline is printed, and the log of TensorBoard holds it."""
    folder = project("trackers", tmp_path)
    done = started(folder, "train.py")
    assert "float16 overflow in model[0]" in done.out, done.err
    (log,) = (folder / "logs").iterdir()
    assert b"float16 overflow in model[0]" in log.read_bytes()


def test_a_test_requires_a_step_without_findings(tmp_path: Path) -> None:
    """That in float16 fails with the finding, that in float32 passes."""
    done = python("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=project("pytest", tmp_path))
    assert "1 failed, 1 passed" in done.out
    assert "float16 overflow at test_step.py:13" in done.out


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning_reports_updates_that_are_rounded_away(tmp_path: Path) -> None:
    """After `fit`, from the callback."""
    done = started(project("lightning", tmp_path), "train.py")
    assert "are unchanged after 32 optimizer steps" in done.out, done.err


def test_the_workflow_gives_the_action_inputs_that_it_has() -> None:
    """And reads an output that it has; the action itself is run by test_github_action.py."""
    workflow = yaml.safe_load((EXAMPLES / "action" / ".github" / "workflows" / "dtypes.yml").read_text())
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    (step,) = [step for step in workflow["jobs"]["dtypes"]["steps"] if "/dtypedoctor@" in step.get("uses", "")]
    assert set(step["with"]) <= set(action["inputs"])
    assert "sarif" in action["outputs"]


def test_the_hook_is_one_that_there_is_and_its_scenario_has_no_mistakes(tmp_path: Path) -> None:
    """What pre-commit runs for it, on the file of the project."""
    folder = project("pre-commit", tmp_path)
    (repository,) = yaml.safe_load((folder / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["id"]: hook for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    _, *words = hooks[repository["hooks"][0]["id"]]["entry"].split()
    done = dtypedoctor(*words, "scenarios/llama_bfloat16.yaml", cwd=folder)
    assert done.code == 0, done.err
