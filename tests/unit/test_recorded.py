"""Real runs, recorded: what is concluded from their traces, which edits are possible, and which further runs are asked for."""

import json
import re
from pathlib import Path

import pytest
from recorded import CONCLUDED, NAMES, assert_says_what_it_rests_on, concluded, play, rendered
from snapshot import entry, read_snapshot

from dtypedoctor.cli.reported import exit_code
from dtypedoctor.report.build import build_report
from dtypedoctor.report.run_facts import origins
from dtypedoctor.report.to_json import Report, render_json


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_run_is_diagnosed_as_before(name: str, tmp_path: Path, rewrite_snapshot: bool) -> None:
    """Each finding with its place, confidence, numbers, provenance, fixes and edits; what each fix did; and no other run is asked for."""
    treatment = play(name, tmp_path)
    now = json.loads(json.dumps(concluded(treatment)))
    if rewrite_snapshot:
        document = json.loads(CONCLUDED.read_text(encoding="utf-8")) if CONCLUDED.exists() else {}
        CONCLUDED.write_text(rendered(document | {name: now}), encoding="utf-8")
        return
    assert now == json.loads(CONCLUDED.read_text(encoding="utf-8"))[name]
    for finding in treatment.findings:
        assert_says_what_it_rests_on(finding)
    report = build_report(treatment, command="", files={}, next_command="")
    if any(not sample.finite for sample in treatment.before.trace.samples):
        assert "is finite" not in report.headline
    assert_reads_well(report)
    known = read_snapshot()
    expected = (known["scripts"] | known["scenarios"])[name]
    assert entry(json.loads(render_json(report)), exit_code(report)) == expected, "the recording is of another run"


def assert_reads_well(report: Report) -> None:
    """A person reads it: operators as they are called, a line in the place of "outside of all modules", an edit in two sentences."""
    told = (report.headline, *(advice.text for advice in report.do_this), *origins_of(report))
    assert not [text for text in told if re.search(r"\baten\.|\b_to_copy\b|None: ", text)]
    for finding in report.findings:
        assert finding.source is None or "the code outside of all modules" not in finding.summary
        assert not [text for text in (finding.summary, finding.cause, *finding.evidence) if " at None" in text]
    for advice in report.do_this:
        said = re.split(r" (?:Not tried|Tried) ", advice.text)[0]
        assert len(re.findall(r"[.:] (?=[A-Z`])|\.$", said)) <= 3


def origins_of(report: Report) -> list[str]:
    """The lines of origin of all findings."""
    return [line for finding in report.findings for line in origins(finding)]


def test_conclusions_are_kept_of_recorded_runs_only() -> None:
    """A recording that was removed leaves no conclusions behind."""
    assert sorted(json.loads(CONCLUDED.read_text(encoding="utf-8"))) == NAMES
