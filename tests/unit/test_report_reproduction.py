"""The script that shows somebody else the same: it installs what was used, and its last line is a command that works."""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from report_builders import overflow
from typer.main import get_command

from dtypedoctor.cli.main import app
from dtypedoctor.report.model import Report
from dtypedoctor.report.surveys import install_command, reproduction_script
from dtypedoctor.scenario.loading import load_scenario
from dtypedoctor.scenario.model import Scenario

TRAINING = {
    "name": "small",
    "summary": "One training.",
    "steps": [{"model": {"name": "builtin:llama"}, "workload": {"kind": "train", "steps": 2}}],
}


def of_script(**more: Any) -> Report:
    """The report of ``dtypedoctor exec train.py --lr 1e-3``; ``more`` goes into its scenario."""
    script = {"kind": "script", "path": "train.py", "args": ["--lr", "1e-3", "a b"]}
    scenario = {"name": "train", "summary": "A script, run unchanged.", "steps": [{"workload": script}], **more}
    return replace(overflow(), scenario=scenario, command="dtypedoctor exec --out runs/x train.py --lr 1e-3 'a b'")


def command(report: Report) -> str:
    """The last line of the script."""
    return reproduction_script(report).splitlines()[-1]


def test_a_scenario_is_in_the_script_once_and_can_be_read_again(tmp_path: Path) -> None:
    """The here-document is the scenario, and the command runs the file that it makes."""
    report = replace(overflow(), name="small", scenario=TRAINING, bisection=None)
    script = reproduction_script(report)
    assert script.count("name: small") == 1
    assert command(report) == "dtypedoctor run small.yaml"
    path = tmp_path / "small.yaml"
    path.write_text(script.partition("<<'END_OF_SCENARIO'\n")[2].partition("END_OF_SCENARIO")[0], encoding="utf-8")
    assert load_scenario(path) == Scenario.model_validate(TRAINING)


def test_a_bisection_is_repeated_as_one() -> None:
    """Running the scenario alone would not show the answer."""
    found = replace(overflow(), name="small", scenario=TRAINING, bisection={"culprits": ["m"]})
    assert command(found) == "dtypedoctor bisect small.yaml"


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({}, "dtypedoctor exec train.py --lr 1e-3 'a b'"),
        ({"distributed": {"processes": 2}}, "dtypedoctor exec --nproc-per-node 2 train.py --lr 1e-3 'a b'"),
        (
            {"remedies": ["autocast-off", "bfloat16"], "watch_every": 0},
            "dtypedoctor exec --every-n-steps 0 --ablate autocast --try bfloat16 train.py --lr 1e-3 'a b'",
        ),
    ],
)
def test_a_script_is_watched_as_it_was(more: dict[str, Any], expected: str) -> None:
    """By name and arguments; where the report was kept does not matter elsewhere. It says that the script must be had."""
    report = of_script(**more)
    assert command(report) == expected
    assert "# train.py is not part of this report: put it here." in reproduction_script(report)
    assert ".yaml" not in reproduction_script(report)


def test_the_options_of_a_script_command_exist() -> None:
    """What the last line uses is what ``exec`` knows."""
    options = {name for option in get_command(app).commands["exec"].params for name in option.opts}  # type: ignore[attr-defined]
    assert {"--nproc-per-node", "--every-n-steps", "--ablate", "--try", "-m"} <= options


def test_a_module_is_named_as_one() -> None:
    """``exec -m`` takes the name that Python takes."""
    step = {"workload": {"kind": "script", "module": "pack.train"}}
    report = replace(of_script(), scenario={"name": "train", "summary": "A script.", "steps": [step]})
    assert command(report) == "dtypedoctor exec -m pack.train"


def test_a_program_that_watched_itself_is_started_by_itself() -> None:
    """It is not watched from outside as well."""
    assert command(replace(of_script(), command="python train.py --lr 1e-3")) == "python train.py --lr 1e-3"


@pytest.mark.parametrize(
    ("recorded", "pin", "index"),
    [
        ("2.13.0+cpu", "torch==2.13.0+cpu", "--extra-index-url=https://download.pytorch.org/whl/cpu "),
        ("2.11.0+cu128", "torch==2.11.0+cu128", "--extra-index-url=https://download.pytorch.org/whl/cu128 "),
        (
            "2.14.0.dev20261101+rocm7.1",
            "torch==2.14.0.dev20261101+rocm7.1",
            "--extra-index-url=https://download.pytorch.org/whl/nightly/rocm7.1 ",
        ),
        ("2.13.0", "torch==2.13.0", ""),
        ("2.13.0a0+git1a2b3c4", "torch==2.13.0a0", ""),
    ],
)
def test_a_build_of_torch_is_pinned_with_the_index_that_has_it(recorded: str, pin: str, index: str) -> None:
    """A CPU build and a CUDA build are different programs; a local build is nowhere to be had."""
    line = install_command({"versions": {"torch": recorded, "peft": "0.21.2"}})
    assert line.startswith(f'pip install {index}"${{DTYPEDOCTOR:?set it to ')
    assert line.endswith(f" {pin} peft==0.21.2")


def test_without_recorded_versions_the_doctor_alone_is_installed() -> None:
    """A report of a worker that died early has no environment."""
    assert install_command({}).count("==") == 0


def test_the_shell_says_how_to_get_the_doctor() -> None:
    """No package index has it; a script that pins a version nobody has would end in an error that helps nobody."""
    line = install_command({}).replace("pip install", "echo")
    missing = subprocess.run(["sh", "-c", line], env={}, capture_output=True, text=True, check=False)
    assert missing.returncode != 0
    assert "set it to the path of a wheel or checkout of dtypedoctor" in missing.stderr
    given = subprocess.run(
        ["sh", "-c", line], env={"DTYPEDOCTOR": "/a b/x.whl"}, capture_output=True, text=True, check=True
    )
    assert given.stdout == "/a b/x.whl\n"
