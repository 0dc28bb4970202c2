"""Applies what a report says under *Do this* to a copy of a corpus script, and diagnoses the copy.

As a program it measures scripts and prints a line of JSON for each: ``python tests/e2e/do_this.py [--share I/N] [script name ...]``.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from exec_corpus import treat_forked
from nursery import preload
from script_corpus import Case, cases

from dtypedoctor.diagnosis.rule import Edit
from dtypedoctor.lab.trials.treatment import Plan
from dtypedoctor.report.build import build_report


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What came of the advice about a script's first finding.

    Attributes:
        edits: that the report shows.
        outcome: ``gone``: the edited copy ends by itself and no longer has the finding; ``no edit``, ``not fixed``.
        left: how the edited copy ended, and its findings.
    """

    name: str
    finding: str
    edits: tuple[Edit, ...]
    outcome: str
    left: str = ""


def apply_advice(case: Case, folder: Path) -> Applied:
    """Diagnoses a copy of the script in ``folder``, changes it as the report says, and diagnoses it again."""
    for name in ("before", "after"):
        shutil.copytree(case.path.parent / "textkit", folder / name / "textkit")  # what some scripts import
    copy = folder / "before" / case.path.name
    copy.write_bytes(case.path.read_bytes())
    found, advice, _ = _diagnosed(copy, folder / "before")
    edits = advice[0].edits if advice else ()
    if not edits:
        return Applied(name=case.name, finding=found[0] if found else "nothing", edits=(), outcome="no edit")
    changed = folder / "after" / case.path.name
    changed.write_text(edited(copy, edits), encoding="utf-8")
    left, _, ended = _diagnosed(changed, folder / "after")
    outcome = "gone" if found[0] not in left and ended == "completed" else "not fixed"
    return Applied(name=case.name, finding=found[0], edits=edits, outcome=outcome, left=f"{ended}; {', '.join(left)}")


def edited(script: Path, edits: Sequence[Edit]) -> str:
    """The text of a script after its edits. Raises AssertionError where one is not about this file as it is."""
    lines = script.read_text(encoding="utf-8").splitlines()
    for edit in edits:
        assert Path(edit.file).name == script.name
        assert lines[edit.line - 1] == edit.old
        lines[edit.line - 1] = edit.new
    gone = {edit.line - 1 for edit in edits if not edit.new}
    return "\n".join(line for number, line in enumerate(lines) if number not in gone) + "\n"


def _diagnosed(script: Path, folder: Path) -> tuple[list[str], tuple, str]:
    treatment = treat_forked(script, folder, Plan(certify=False, only=frozenset()), tries_edits=True)
    report = build_report(treatment, command="", files={}, next_command="")
    return [finding.id for finding in report.findings], report.do_this, treatment.before_summary.ended


def failing() -> list[Case]:
    """The scripts in which something is wrong."""
    return [case for case in cases() if not case.healthy]


def main(arguments: list[str]) -> None:
    """Measures the scripts that are named, or the share I of N of all."""
    if arguments[:1] == ["--share"]:
        part, _, whole = arguments[1].partition("/")
        chosen = failing()[int(part) :: int(whole)]
    else:
        chosen = [case for case in failing() if case.name in arguments or not arguments]
    preload(frozenset(library for case in chosen for library in case.imports))
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            try:
                done = apply_advice(case, Path(folder))
            except Exception as error:  # noqa: BLE001  (one script must not end the measurement of the others)
                done = Applied(name=case.name, finding="", edits=(), outcome=f"ERROR {type(error).__name__}: {error}")
        changes = [f"{edit.line}: {edit.new.strip()}" for edit in done.edits]
        print(
            json.dumps(
                {
                    "name": done.name,
                    "finding": done.finding,
                    "outcome": done.outcome,
                    "left": done.left,
                    "edits": changes,
                }
            ),
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
