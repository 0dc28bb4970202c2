"""A package outside of the tree adds a model, a workload, a correction, a rule and a format, as docs/extending.md describes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command import Finished, forked, report_of

PACKAGE = Path(__file__).with_name("extension")
PAGE = (Path(__file__).parents[2] / "docs" / "extending.md").read_text(encoding="utf-8")
SCENARIO = PACKAGE / "tinylab_overflow.yaml"
SILENT = PACKAGE / "tinylab_underflow.yaml"
OWN_TEST = PACKAGE / "test_tinylab.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed the package."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    for file in (path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".toml", ".md")):
        copy = source / file.relative_to(PACKAGE)
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(file.read_bytes())
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*install, "--target", target, source], check=True, capture_output=True)
    return target


@pytest.fixture(scope="module")
def treated(site: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    directory = tmp_path_factory.mktemp("run")
    (directory / SCENARIO.name).write_bytes(SCENARIO.read_bytes())
    finished = with_package(site, "run", SCENARIO.name, "--out", "out", "--format", "csv", cwd=directory)
    return finished, directory / "out"


def with_package(site: Path, *arguments: str | Path, cwd: Path, **environment: str) -> Finished:
    """Runs dtypedoctor where the package is installed."""
    path = os.pathsep.join([*sys.path, str(site)])
    return forked(*arguments, cwd=cwd, PYTHONPATH=path, **environment)


def test_a_scenario_of_the_package_fails_and_is_fixed_by_its_correction(treated: tuple[Finished, Path]) -> None:
    """The model is built, the workload runs, the finding proposes the correction, and the correction proves the cause."""
    finished, directory = treated
    assert finished.code == 0, finished.err
    report = report_of(directory)
    assert [(one["id"], one["fqn"], one["confidence"]) for one in report["findings"]] == [
        ("float16-overflow", "layer", "proven")
    ]
    assert report["findings"][0]["remedies"][:2] == ["tinylab-gate-float32", "bfloat16"]
    assert {trial["remedy"]: trial["outcome"] for trial in report["trials"]} == {
        "tinylab-gate-float32": "fixed",
        "bfloat16": "fixed",
    }


def test_the_report_is_printed_in_the_format_of_the_package(treated: tuple[Finished, Path], site: Path) -> None:
    """By `run` at its end, and by `report` later."""
    finished, directory = treated
    lines = "run,finding,module,step\ntinylab_overflow,float16-overflow,layer,1\n"
    assert finished.out == lines
    again = with_package(site, "report", directory, "--format", "csv", cwd=directory)
    assert (again.code, again.out, again.err) == (0, lines, "")


def test_a_rule_of_the_package_finds_what_raises_nothing_and_its_remedy_proves_it(site: Path, tmp_path: Path) -> None:
    """The package's own test passes; its finding has the references of its spec, and `explain` prints its page."""
    for file in (SILENT, OWN_TEST):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = os.pathsep.join([*sys.path, str(site)])
    own_test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", "temp", OWN_TEST.name]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(own_test, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    findings = report_of(tmp_path / "temp" / "test_zeros0" / "out")["findings"]
    (found,) = [finding for finding in findings if finding["id"] == "tinylab-gate-underflow"]
    assert found["severity"] == "warning"
    assert found["references"] == ["https://github.com/example/tinylab/issues/1"]
    explained = with_package(site, "explain", "tinylab-gate-underflow", cwd=tmp_path)
    assert explained.out == (PACKAGE / "tinylab" / "gate_underflow.md").read_text()


def test_without_the_package_the_scenario_is_refused_with_what_there_is(tmp_path: Path) -> None:
    """Exit 2 and the names that are known."""
    (tmp_path / SCENARIO.name).write_text(SCENARIO.read_text().replace("tinylab-gate-float32, ", ""))
    finished = forked("run", SCENARIO.name, cwd=tmp_path)
    assert finished.code == 2
    assert "there is no builtin model 'tinylab-gated'" in finished.err
    assert "builtin:llama-tiny" in finished.err


def test_the_page_shows_the_files_of_the_package() -> None:
    """Whoever copies them gets what this test has used."""
    shown = dict(re.findall(r"`([\w./]+)`:\n\n```(?:python|toml|yaml|markdown)\n(.*?)```", PAGE, re.DOTALL))
    files = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.*") if path.is_file()}
    assert shown == {name: text for name, text in files.items() if name in shown}
    assert {"pyproject.toml", "tinylab/plugin.py", "tinylab/correction.py", "tinylab/rule.py"} <= set(shown)
