"""``report --for PROJECT``: a report under the headings of another project's issue template."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planting import planted, rich_report
from report_builders import everything, healthy, overflow

from dtypedoctor.cli import reading
from dtypedoctor.cli.output import kept
from dtypedoctor.errors import UsageError
from dtypedoctor.redaction.redact import Private, redact
from dtypedoctor.report.model import Report
from dtypedoctor.report.project_tickets import NO_ANSWER, TEMPLATES, template_of, ticket
from dtypedoctor.report.to_markdown import LIMIT

HEADINGS = {
    "trl": ["Reproduction", "System Info", "Checklist"],
    "peft": ["System Info", "Who can help?", "Reproduction", "Expected behavior"],
    "transformers": ["System Info", "Who can help?", "Information", "Tasks", "Reproduction", "Expected behavior"],
    "unsloth": [],
    "pytorch": ["🐛 Describe the bug", "Versions"],
    "axolotl": [
        "Please check that this issue hasn't been reported before.",
        "Expected Behavior",
        "Current behaviour",
        "Steps to reproduce",
        "Possible solution",
        "Which Operating Systems are you using?",
        "Python Version",
        "axolotl branch-commit",
        "Acknowledgements",
    ],
}
"""The labels of each project's form, as GitHub writes them above the answers."""

FENCED = re.compile(r"^(`{3,})\w*\n.*?^\1$", re.MULTILINE | re.DOTALL)
SCRIPT = "import torch\n\ntorch.manual_seed(0)"


def recorded(**more: Any) -> Report:
    """An overflow in an environment that is not the one of this process."""
    environment = {
        "python": "3.99.1",
        "platform": "Linux-6.9-x86_64-with-glibc2.36",
        "device": "cuda:0",
        "versions": {
            "torch": "9.8.7+cu130",
            "transformers": "6.5.4",
            "trl": "3.2.1",
            "peft": "0.98",
            "unsloth": "2030.1.1",
        },
        "gpu": {"name": "NVIDIA H200", "count": 2, "cudnn": 91002},
        "driver": "580.1",
        "cuda": "13.0",
        **more,
    }
    return replace(overflow(), environment=environment, capsule={"directory": "capsule", "script": SCRIPT})


def fields(text: str) -> dict[str, str]:
    """What stands below each heading."""
    _, *parts = re.split(r"^### (.+)\n\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("project", TEMPLATES)
def test_headings_are_those_of_the_template(project: str) -> None:
    """In its order, so that an answer is found where the maintainer looks for it."""
    assert list(fields(ticket(recorded(), project))) == HEADINGS[project]


@pytest.mark.parametrize("project", TEMPLATES)
def test_finding_script_and_environment_are_in_every_ticket(project: str) -> None:
    """The environment is that of the failing process."""
    text = ticket(recorded(), project)
    assert overflow().headline.partition(":")[0] in text
    assert f"```python\n{SCRIPT}\n```" in text
    assert "model = model.bfloat16()" in text
    assert "3.99.1" in text or project == "unsloth"
    assert "9.8.7+cu130" in text or project == "axolotl"


@pytest.mark.parametrize(
    ("project", "heading", "line"),
    [
        ("transformers", "System Info", "- `transformers` version: 6.5.4"),
        ("transformers", "System Info", "- PyTorch version (accelerator?): 9.8.7+cu130 (CUDA)"),
        ("transformers", "System Info", "- Using GPU in script?: yes"),
        ("transformers", "System Info", "- Accelerate config: not recorded"),
        ("trl", "System Info", "- accelerator(s): 2 × NVIDIA H200"),
        ("trl", "System Info", "- vLLM version: not installed"),
        ("pytorch", "Versions", "CUDA used to build PyTorch: 13.0"),
        ("pytorch", "Versions", "[pip3] torch==9.8.7+cu130"),
        ("axolotl", "Which Operating Systems are you using?", "- [x] Linux"),
        ("axolotl", "Which Operating Systems are you using?", "- [ ] Windows"),
        ("axolotl", "Acknowledgements", "- [ ] I am using the latest version of axolotl."),
        ("peft", "Who can help?", NO_ANSWER),
        ("peft", "System Info", "- peft: 0.98"),
    ],
)
def test_each_environment_block_has_the_projects_own_fields(project: str, heading: str, line: str) -> None:
    """What was not recorded says so, and nobody's box is ticked for them."""
    assert line in fields(ticket(recorded(), project))[heading].splitlines()


def test_unsloths_questions_are_answered_in_their_order() -> None:
    """Its template is a numbered list."""
    lines = ticket(recorded(), "unsloth").splitlines()
    assert lines[2] == "3. Number GPUs used, use `nvidia-smi`: 2 × NVIDIA H200"
    assert "unsloth 2030.1.1" in lines[4]


def test_axolotls_solution_is_not_in_the_behavior() -> None:
    """It has a heading of its own."""
    answers = fields(ticket(recorded(), "axolotl"))
    assert "bfloat16()" in answers["Possible solution"]
    assert "bfloat16()" not in answers["Current behaviour"]


def test_the_title_cannot_control_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is printed as it is pasted, and comes from a report that somebody else may have sent."""
    kept(tmp_path, replace(overflow(), headline="a\x1b]0;title\x07\nb"))
    reading.report([tmp_path], project="trl")
    assert "Title: a\\x1b]0;title\\x07 b\n" in capsys.readouterr().err


def test_an_unknown_project_is_refused_with_those_that_are_known() -> None:
    """Before the run is read."""
    with pytest.raises(UsageError, match="no template for 'pfet'; did you mean 'peft'") as refused:
        template_of("pfet")
    assert "unsloth" in refused.value.hint


@pytest.mark.parametrize("project", TEMPLATES)
def test_no_secret_is_in_a_ticket(project: str) -> None:
    """Planted in every field of a report."""
    secret = "hf_" + "A1b2C3d4" * 4
    assert secret not in ticket(redact(planted(rich_report(), secret), Private()), project)


@pytest.mark.parametrize("project", TEMPLATES)
@pytest.mark.parametrize("position", range(len(everything())))
def test_any_report_makes_a_ticket_that_fits(project: str, position: int) -> None:
    """Names of 10,000 characters, markup, and a report without a finding or an environment."""
    for report in (everything()[position], replace(healthy(), environment={})):
        text = ticket(report, project)
        assert len(text.encode()) <= LIMIT
        assert "<script>" not in FENCED.sub("", text)
        assert list(fields(text))[: len(HEADINGS[project])] == HEADINGS[project]
