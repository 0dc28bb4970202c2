"""What a coding agent reads: the brief report, the skill, the index of the documentation."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from report_builders import everything, healthy, overflow

from dtypedoctor.cli.enabling import skill
from dtypedoctor.diagnosis.rule import Advice, Edit
from dtypedoctor.errors import UsageError
from dtypedoctor.report.files import with_typed_paths
from dtypedoctor.report.first_screen import BRIEF, brief
from dtypedoctor.report.to_json import Report, render_data

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import llms

SKILL = Path(__file__).parents[2] / "dtypedoctor" / "skills" / "dtypedoctor" / "SKILL.md"
LONG = "wörd " * 500


def endless() -> Report:
    """A report in which every text is long, in letters that JSON writes with six characters."""
    report = overflow()
    edits = tuple(Edit(file="train.py", line=n, old="a" * 90, new="b" * 90) for n in range(20))
    finding = replace(report.findings[0], id="f" * 60, summary=LONG, source=LONG, op=LONG, fqn=LONG)
    advice = Advice(finding=finding.id, text=LONG, edits=edits, tried="run")
    return replace(report, headline=LONG, findings=(finding,) * 12, do_this=(advice,) * 12, noticed=LONG,
                   coverage=(LONG,) * 20, next_command=LONG)  # fmt: skip


@pytest.mark.parametrize("report", [*everything(), endless()])
def test_a_brief_report_has_the_same_keys_in_the_same_order_within_two_kilobytes(report: Report) -> None:
    """However much there is to say."""
    text = render_data(brief(report))
    assert len(text.encode()) <= BRIEF
    assert list(json.loads(text)) == list(json.loads(render_data(brief(healthy()))))


def test_the_next_command_of_a_brief_report_names_files_that_are_there(tmp_path: Path) -> None:
    """A report in a file names no absolute path: the patch and the capsule are named as the run directory is typed."""
    (tmp_path / "do-this.patch").touch()
    told = replace(overflow(), next_command="patch -p0 < do-this.patch && dtypedoctor exec train.py")
    assert (
        with_typed_paths(told, tmp_path).next_command
        == f"patch -p0 < {tmp_path}/do-this.patch && dtypedoctor exec train.py"
    )
    relative = "dtypedoctor replay runs/first/capsule"
    assert with_typed_paths(replace(told, next_command=relative), tmp_path).next_command == relative


def test_the_skill_explains_every_key_of_the_brief_report() -> None:
    """And none that it has not; ``schema`` explains itself."""
    table = re.findall(r"^\| (`.+?) \|", SKILL.read_text(), re.MULTILINE)
    explained = re.findall(r"`(\w+)`", " ".join(table))
    keys = set(json.loads(render_data(brief(healthy()))))
    assert set(explained) | {"not_covered"} == keys - {"schema"}
    assert "not_covered" in SKILL.read_text()


def test_an_installed_skill_that_was_edited_is_not_lost(tmp_path: Path) -> None:
    """Installing twice is fine; what differs stays, until it is to be replaced."""
    place = tmp_path / "dtypedoctor" / "SKILL.md"
    skill(tmp_path, install=True)
    skill(tmp_path, install=True)
    assert place.read_text() == SKILL.read_text()
    place.write_text("mine")
    with pytest.raises(UsageError, match="differs from the skill"):
        skill(tmp_path, install=True)
    assert place.read_text() == "mine"
    skill(tmp_path, install=True, force=True)
    assert place.read_text() == SKILL.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("has_settings", [True, False])
def test_a_skill_goes_where_an_agent_looks(tmp_path: Path, has_settings: bool) -> None:
    """To the project that the working directory is in, where that has a folder for it; else to the user's own skills."""
    home, project = tmp_path / "home", tmp_path / "home" / "project"
    (project / "src").mkdir(parents=True)
    (home / ".claude").mkdir()
    if has_settings:
        (project / ".claude").mkdir()
    command = [sys.executable, "-m", "dtypedoctor", "skill", "--install"]
    environment = {"HOME": str(home), "PYTHONPATH": str(SKILL.parents[3])}
    done = subprocess.run(
        command, cwd=project / "src", env=environment, capture_output=True, text=True, check=True, timeout=300
    )
    expected = (project if has_settings else home) / ".claude" / "skills" / "dtypedoctor" / "SKILL.md"
    assert done.stderr == f"installed: {expected}\n"
    assert expected.read_text() == SKILL.read_text()


def test_the_index_for_language_models_is_current() -> None:
    """Where it is not, `python tools/llms.py` writes it anew."""
    assert llms.PLACE.read_text(encoding="utf-8") == llms.text(), "run python tools/llms.py"
