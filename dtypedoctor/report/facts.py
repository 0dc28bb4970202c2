"""Parts of a report in words, for the formats that lay them out."""

from collections.abc import Iterator, Mapping
from typing import Any

from dtypedoctor.diagnosis.finding import Confidence, Finding, Link
from dtypedoctor.report.model import Observer, Outcome, Report, Status
from dtypedoctor.report.numbers import ABSENT, number
from dtypedoctor.report.text import one_line

__all__ = [
    "CONFIDENCE",
    "STATUS",
    "bisection_summary",
    "bisection_verdicts",
    "cures",
    "environment_rows",
    "link_dtypes",
    "no_cure",
    "observer_sentence",
    "place",
]

STATUS = {
    Status.HEALTHY: "HEALTHY",
    Status.FINDINGS: "FOUND",
    Status.WORKER_DIED: "WORKER DIED",
    Status.ERROR: "ERROR",
}
CONFIDENCE = {
    Confidence.PROVEN: "proven by counterfactual",
    Confidence.LIKELY: "likely, not proven",
    Confidence.POSSIBLE: "possible, not proven",
}


def place(finding: Finding) -> list[tuple[str, str]]:
    """Where and when a finding is, as labelled values; what is not known is left out."""
    when = [finding.phase or "", f"step {finding.step}" if finding.step is not None else ""]
    rows = [
        ("module", finding.fqn),
        ("op", finding.op),
        ("when", ", ".join(part for part in when if part)),
        ("dtype", finding.dtype),
        ("source", finding.source),
    ]
    return [(label, one_line(value)) for label, value in rows if value]


def cures(report: Report) -> list[str]:
    """The remedies that were tried and fix it, in the order in which they were tried."""
    return [trial.remedy for trial in report.trials if trial.outcome is Outcome.FIXED]


def no_cure(report: Report) -> str:
    """What is said where :func:`cures` is empty."""
    return "none of the remedies tried" if report.trials else "no remedy was tried"


def link_dtypes(link: Link) -> str:
    """What a link of a provenance chain does to the dtype, e.g. ``bfloat16 → float32``."""
    return " → ".join(one_line(dtype, 40) for dtype in (link.dtype_in, link.dtype_out) if dtype) or ABSENT


def observer_sentence(observer: Observer) -> str:
    """The observer certificate: whether watching changed the run."""
    verdict = {
        True: "The watch changed nothing: the run is bitwise equal without it.",
        False: "The watch CHANGED the run: it is not bitwise equal without it.",
        None: "Whether the watch changed the run is not known:",
    }[observer.bitwise_equal]
    return f"{verdict} {observer.reason}".strip()


def environment_rows(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The environment flattened to dotted names, in the order in which it was recorded."""
    return list(_flat("", environment))


def bisection_summary(bisection: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a bisection found, as labelled values."""
    minimal = "yes" if bisection.get("one_minimal") else "no"
    return [
        ("culprits", ", ".join(map(str, bisection.get("culprits") or ())) or "none"),
        ("corrections", ", ".join(map(str, bisection.get("corrections") or ())) or "none"),
        ("probes", str(bisection.get("probes", ABSENT))),
        ("1-minimal", minimal),
    ]


def bisection_verdicts(bisection: Mapping[str, Any]) -> list[tuple[str, str, str, str, str]]:
    """Mode, outcome, phase, module and absmax of each verdict."""
    return [
        (_word(v, "mode"), _word(v, "outcome"), _word(v, "phase"), _word(v, "fqn"), _magnitude(v))
        for v in bisection.get("verdicts") or ()
    ]


def _word(verdict: Mapping[str, Any], key: str) -> str:
    return one_line(str(verdict.get(key) or ABSENT))


def _magnitude(verdict: Mapping[str, Any]) -> str:
    value = verdict.get("absmax")
    return number(float(value)) if isinstance(value, (int, float)) else ABSENT


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), item)
    elif isinstance(value, (list, tuple)):
        yield prefix, ", ".join(map(str, value))
    else:
        yield prefix, ABSENT if value is None else str(value)
