"""What a release consists of: the wheel as pip installs it, and the documentation as a site."""

import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
LARGEST = 1_500_000


def tracked(folder: Path) -> Path:
    """A copy of what git has, as a release is built from."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, files.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def run(*command: str, cwd: Path) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.release
@pytest.mark.slow
def test_the_wheel_is_small_and_holds_what_the_commands_read(tmp_path: Path) -> None:
    """Pages of findings, scenarios, the skill, the schema; and both PyPI's check and that of a wheel's contents pass."""
    for tool in ("build", "hatchling", "twine", "check_wheel_contents"):
        pytest.importorskip(tool, reason="needs the extra dtypedoctor[release]")
    source = tracked(tmp_path / "source")
    run("build", "--no-isolation", "--outdir", str(tmp_path / "dist"), cwd=source)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert wheel.stat().st_size <= LARGEST
    names = set(zipfile.ZipFile(wheel).namelist())
    for name in ("data/findings/float16-overflow.md", "data/scenarios/gemma4_grpo_fp16.yaml", "skills/dtypedoctor/SKILL.md",
                 "report/schema.json", "py.typed"):  # fmt: skip
        assert f"dtypedoctor/{name}" in names
    run("twine", "check", "--strict", *map(str, (tmp_path / "dist").iterdir()), cwd=tmp_path)
    run("check_wheel_contents", str(wheel), cwd=tmp_path)


@pytest.mark.release
@pytest.mark.slow
@pytest.mark.skipif(find_spec("material") is None, reason="needs the extra dtypedoctor[release]")
def test_the_documentation_builds_as_a_site(tmp_path: Path) -> None:
    """Strictly: every link and heading that a page names is there; a finding is found by the message that torch gives."""
    run("mkdocs", "build", "--strict", "-q", "-f", str(ROOT / ".github" / "mkdocs.yml"), "-d", str(tmp_path), cwd=ROOT)
    page = (tmp_path / "findings" / "head-dtype-mismatch" / "index.html").read_text()
    assert "<title>expected m1 and m2 to have the same dtype" in page


def test_the_workflows_run_what_a_machine_of_ones_own_runs() -> None:
    """CI and a release are `.ci/run`; nothing is published without it, and no token is kept."""
    folder = ROOT / ".github" / "workflows"
    ci, release = (yaml.safe_load((folder / name).read_text()) for name in ("ci.yml", "release.yml"))
    assert ".ci/run" in [step.get("run") for step in ci["jobs"]["tests"]["steps"]]
    assert ".ci/run" in [step.get("run") for step in release["jobs"]["tests"]["steps"]]
    assert (release["jobs"]["build"]["needs"], release["jobs"]["publish"]["needs"]) == ("tests", "build")
    assert release["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert "password" not in (folder / "release.yml").read_text()
