"""``action.yml`` and ``.pre-commit-hooks.yaml``: the steps of the action, run by a real bash as a runner would; the hook, by a real pre-commit."""

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
INPUTS = {name: declared["default"] for name, declared in ACTION["inputs"].items()}
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"]}
OVERFLOW = "import torch\n\nx = torch.full((4,), 300.0, dtype=torch.float16)\nassert (x * x).isfinite().all()\n"
SCENARIO = """name: fine
summary: A model that trains.
steps:
  - model: {name: "builtin:llama-tiny"}
    workload: {kind: forward}
"""


@dataclass(frozen=True)
class Ran:
    """What the step has left: its exit code, its log, its outputs and its page of the job summary."""

    code: int
    log: str
    outputs: dict[str, str]
    summary: str


def step(folder: Path, name: str, outputs: dict[str, str] | None = None, **inputs: str) -> Ran:
    """Runs one step of the action in ``folder``, expressions replaced as GitHub replaces them."""
    known = {f"inputs.{key}": value for key, value in (INPUTS | inputs).items()}
    known["github.action_path"] = str(ROOT)
    known |= {f"steps.doctor.outputs.{key}": value for key, value in (outputs or {}).items()}

    def value(expression: re.Match[str]) -> str:
        return known[expression[1].strip()]

    given = {key: re.sub(r"\$\{\{(.+?)\}\}", value, text) for key, text in STEPS[name].get("env", {}).items()}
    out, page = folder / "github-output", folder / "github-summary"
    out.touch()
    page.touch()
    bin_of_python = str(Path(sys.executable).parent)
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[name]["run"]],
        cwd=folder,
        env=os.environ
        | {"GITHUB_OUTPUT": str(out), "GITHUB_STEP_SUMMARY": str(page), "PATH": f"{bin_of_python}:{os.environ['PATH']}"}
        | given,
        capture_output=True,
        text=True,
        check=False,
    )
    left = dict(line.split("=", 1) for line in out.read_text().splitlines())
    return Ran(done.returncode, done.stdout + done.stderr, left, page.read_text())


@pytest.mark.slow
def test_a_script_that_overflows_fails_the_job_at_its_line(tmp_path: Path) -> None:
    """Summary, annotation, SARIF and JUnit; then the exit code."""
    (tmp_path / "train it.py").write_text(OVERFLOW)
    ran = step(tmp_path, "Run dtypedoctor", exec="'train it.py' '$(touch owned)'")
    assert ran.code == 0, ran.log
    assert ran.outputs == {"exit-code": "10", "sarif": "dtype-report/dtypedoctor.sarif"}
    assert "float16-overflow" in ran.summary
    assert re.search(r"^::error file=train it\.py,line=4,title=float16-overflow::", ran.log, re.MULTILINE)
    (result,) = json.loads((tmp_path / ran.outputs["sarif"]).read_text())["runs"][0]["results"]
    assert result["ruleId"] == "float16-overflow"
    assert "<testsuites" in (tmp_path / "dtype-report" / "dtypedoctor.xml").read_text()
    assert not (tmp_path / "owned").exists()
    assert step(tmp_path, "Pass on the exit code", ran.outputs).code == 10


@pytest.mark.parametrize("inputs", [{}, {"run": "scenarios/", "exec": "train.py"}], ids=["none", "both"])
def test_the_action_needs_exactly_one_of_run_and_exec(inputs: dict[str, str], tmp_path: Path) -> None:
    """An error on the job's page, before anything has run."""
    ran = step(tmp_path, "Run dtypedoctor", **inputs)
    assert ran.code == 2
    assert "::error title=dtypedoctor::give one of the inputs run and exec" in ran.log


def test_inputs_reach_the_shell_as_environment_only() -> None:
    """An expression inside of a script would run what a pull request's title says."""
    assert all("${{" not in one.get("run", "") for one in STEPS.values())


def test_nothing_that_is_not_redacted_is_uploaded() -> None:
    """Reports are redacted before they are written; traces and output are not."""
    (upload,) = (one for one in STEPS.values() if "uses" in one)
    uploaded = [line.rpartition("/")[2] for line in upload["with"]["path"].splitlines()]
    assert set(uploaded) == {"dtypedoctor.xml", "dtypedoctor.sarif", "report.md", "report.json"}


def test_the_action_meets_githubs_schema() -> None:
    """As SchemaStore has it."""
    package = pytest.importorskip("check_jsonschema", reason="check-jsonschema brings the schema of actions")
    schema = Path(package.__file__).parent / "builtin_schemas" / "vendor" / "github-actions.json"
    jsonschema.validate(ACTION, json.loads(schema.read_text(encoding="utf-8")))


def committed(folder: Path, files: dict[str, str]) -> None:
    """A git repository with these files."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for words in (
        ("init", "-q"),
        ("add", "-A"),
        ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "files"),
    ):
        subprocess.run(["git", *words], cwd=folder, check=True)


@pytest.mark.release
@pytest.mark.slow
def test_the_hook_checks_scenario_files(tmp_path: Path) -> None:
    """A real pre-commit takes it from a repository; a misspelt key fails the commit with its line, a file elsewhere is not looked at."""
    pytest.importorskip("pre_commit", reason="pre-commit is not installed")
    hooks, work = tmp_path / "hooks", tmp_path / "work"
    committed(hooks, {".pre-commit-hooks.yaml": (ROOT / ".pre-commit-hooks.yaml").read_text()})
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=hooks, capture_output=True, text=True, check=True)
    config: dict[str, Any] = {
        "repos": [{"repo": str(hooks), "rev": revision.stdout.strip(), "hooks": [{"id": "dtypedoctor-scenarios"}]}]
    }
    files = {
        ".pre-commit-config.yaml": yaml.safe_dump(config),
        "scenarios/fine.yaml": SCENARIO,
        "other/x.yaml": "a: 1\n",
    }
    committed(work, files)

    def hook() -> subprocess.CompletedProcess[str]:
        environment = os.environ | {
            "PRE_COMMIT_HOME": str(tmp_path / "home"),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        words = [sys.executable, "-m", "pre_commit", "run", "--all-files", "--verbose"]
        return subprocess.run(words, cwd=work, capture_output=True, text=True, check=False, env=environment)

    passed = hook()
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "1 scenario file checked, none with mistakes" in passed.stdout
    (work / "scenarios" / "fine.yaml").write_text(SCENARIO.replace("workload", "wrkload"))
    failed = hook()
    assert failed.returncode == 1
    assert re.search(r"scenarios/fine\.yaml:5:\d+: .*wrkload", failed.stdout)


def test_both_files_are_in_the_source_distribution() -> None:
    """Tests are in it, and these need them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert {"action.yml", ".pre-commit-hooks.yaml"} <= set(
        settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    )
