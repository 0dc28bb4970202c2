"""Whoever asks what a trace says (treatment, judge, summary, report), the rules look at it once."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtypedoctor.diagnosis import rules
from dtypedoctor.diagnosis.rule import Finding, Rule
from dtypedoctor.lab.runner.launch import Launcher
from dtypedoctor.lab.scenarios.model import Request, Scenario
from dtypedoctor.lab.trials.treatment import Plan, treat
from dtypedoctor.report.build import build_report
from dtypedoctor.runner.run import Run
from dtypedoctor.trace.model import Trace

pytestmark = pytest.mark.slow

CASE = {
    "name": "case",
    "summary": "A case.",
    "steps": [{"model": {"name": "builtin:llama-tiny"}, "workload": {"kind": "forward", "steps": 1}}],
    "remedies": ["bfloat16"],
}


def test_detectors_look_at_each_trace_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real run, an unwatched one, a trial of a remedy, and the report of them."""
    looks: Counter[float] = Counter()
    labels: dict[float, str] = {}

    def counting(trace: Trace) -> Iterator[Finding]:
        assert trace.header is not None
        looks[trace.header.created] += 1
        return iter(())

    with_counting = (*rules(), Rule(name="counting", specs=(), detect=counting))
    monkeypatch.setattr("dtypedoctor.diagnosis.rules", lambda: with_counting)
    with Launcher(tmp_path / "server.log") as launcher:

        def run(label: str, request: Request) -> Run:
            finished = launcher.run(request, tmp_path / label)
            assert finished.trace.header is not None
            labels[finished.trace.header.created] = label
            return finished

        scenario = Scenario.model_validate(CASE)
        treatment = treat(scenario, run, Plan())
        build_report(treatment, command="", files={}, next_command="")

    looked_at = {labels[when]: count for when, count in looks.items()}
    assert looked_at == {"before": 1, "remedy-bfloat16": 1}
