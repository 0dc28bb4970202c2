"""Parts of a report in words, for the formats that lay them out."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from dtypedoctor.diagnosis.finding import Confidence, Finding, Link
from dtypedoctor.diagnosis.mismatch.regions import OWN_WORKLOADS
from dtypedoctor.report.measured import Measured
from dtypedoctor.report.model import Observer, Report, Status
from dtypedoctor.report.numbers import ABSENT
from dtypedoctor.report.text import one_line

__all__ = [
    "CONFIDENCE",
    "chains",
    "ended_with",
    "environment_rows",
    "link_dtypes",
    "measured_sentence",
    "observer_sentence",
    "place",
    "proven_means",
    "status_word",
    "title",
    "watched_and_not",
]

STATUS = {
    Status.HEALTHY: "HEALTHY",
    Status.FINDINGS: "FOUND",
    Status.WORKER_DIED: "WORKER DIED",
    Status.ERROR: "ERROR",
    Status.UNKNOWN: "UNKNOWN",
}
CONFIDENCE = {
    Confidence.PROVEN: "proven by counterfactual",
    Confidence.LIKELY: "likely, not proven",
    Confidence.POSSIBLE: "possible, not proven",
}
_SETTLED = "the operation, or the whole run, was repeated with one thing changed, and that settled it"
_OF_A_REGION = "autocast-contradicts-model"


def status_word(report: Report) -> str:
    """The status in capitals, as it stands before the headline."""
    nothing = bool(report.measured) and not any(measured for measured, _ in report.measured.values())
    ran = any(total for _, total in report.measured.values())
    return "NOTHING MEASURED" if report.status is Status.UNKNOWN and nothing and not ran else STATUS[report.status]


def measured_sentence(report: Report) -> str:
    """How much of what ran was measured; empty where that is not known."""
    told = Measured(counts=report.measured).describe()
    return f"Measured: {told}." if told else ""


def proven_means(report: Report) -> str:
    """What *proven* means, and of which finding it is said where that is not the first one; empty where nothing is proven."""
    proven = next((finding for finding in report.findings if finding.confidence is Confidence.PROVEN), None)
    if proven is None:
        return ""
    how = f"by counterfactual: {one_line(proven.proven_by or _SETTLED)}."
    return f"Proven {how}" if proven is report.findings[0] else f"{one_line(proven.id)}, further down, is proven {how}"


def place(finding: Finding) -> list[tuple[str, str]]:
    """Where and when a finding is, as labelled values; what is not known is left out."""
    number = f"step {finding.step}" if finding.call is None else f"call {finding.call}"
    when = [finding.phase or "", number if finding.step is not None else ""]
    rows = [
        ("module", finding.fqn),
        ("op", finding.op),
        ("when", ", ".join(part for part in when if part)),
        (_dtype_of_what(finding), finding.dtype),
        ("source", _source(finding)),
    ]
    return [(label, one_line(value)) for label, value in rows if value]


def _dtype_of_what(finding: Finding) -> str:
    if finding.id == _OF_A_REGION:
        return "region dtype"
    failing = finding.provenance[0] if finding.provenance else None  # its dtype_in is that of the odd operand
    return "operand dtype" if failing is not None and failing.dtype_in == finding.dtype else "dtype"


def _source(finding: Finding) -> str | None:
    own = finding.source is not None and finding.source.startswith(OWN_WORKLOADS)
    return f"{finding.source} (the workload of the scenario)" if own else finding.source


def title(finding: Finding) -> str:
    """The sentence at the head of a finding; of one that another finding leads to, that it is where that one surfaces."""
    return f"Where it surfaces: {finding.summary}" if finding.consequence_of else finding.summary


def chains(finding: Finding) -> Iterator[tuple[str, tuple[Link, ...]]]:
    """The provenance chains of a finding that has any: what each is about, and its links in a reader's words."""
    if finding.provenance:
        yield "where the dtype came from, back from the failing op", tuple(map(_worded, _joined(finding.provenance)))
    if finding.met:
        yield "where the dtype that it met came from", tuple(map(_worded, finding.met))


def _joined(links: tuple[Link, ...]) -> tuple[Link, ...]:
    """A last link that goes back to the failing op itself is told with that op."""
    if len(links) < 2 or (links[0].fqn, links[0].source) != (links[-1].fqn, links[-1].source):
        return links
    return (replace(links[0], op=f"{links[0].op} ({links[-1].op.replace(f'{links[0].op} is ', '')})"), *links[1:-1])


def _worded(link: Link) -> Link:
    """Names of parameters without that of the module, which the link has already."""
    return replace(link, op=link.op.replace(f"{link.fqn}.", "")) if link.fqn else link


def watched_and_not(observer: Observer) -> str:
    """Whether the run was the same without the watch, in few words; empty where nothing is known of that."""
    if observer.bitwise_equal is None:
        return "raises the same error" if observer.same_error else ""
    return "the same, bit for bit" if observer.bitwise_equal else "NOT the same, see below"


def ended_with(report: Report) -> str:
    """What the untreated run raised, when and where; empty where it did not raise, or the headline says it already."""
    ended = report.before.ended if report.before is not None else "completed"
    return one_line(ended, 400) if report.status is Status.FINDINGS and ended != "completed" else ""


def link_dtypes(link: Link) -> str:
    """What a link of a provenance chain does to the dtype, e.g. ``bfloat16 → float32``."""
    return " → ".join(one_line(dtype, 40) for dtype in (link.dtype_in, link.dtype_out) if dtype) or ABSENT


def observer_sentence(observer: Observer) -> str:
    """The observer certificate: whether watching changed the run."""
    if observer.bitwise_equal is None and observer.same_error:
        return f"The watch is not the reason: {observer.reason.rstrip('.')}."
    verdict = {
        True: "The watch changed nothing, bit for bit:",
        False: "The watch CHANGED the run:",
        None: "Whether the watch changed a number could not be checked:",
    }[observer.bitwise_equal]
    return f"{verdict} {observer.reason.rstrip('.')}."


def raw_sentence(report: Report) -> str:
    """Where the program's own output lies, which is not redacted; empty where it was not kept."""
    place = report.files.get("raw_output")
    return (
        f"The program's whole output is in {place}: raw, with whatever secrets and data it printed; only you can read it."
        if place
        else ""
    )


def environment_rows(environment: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The environment flattened to dotted names, in the order in which it was recorded; what is not there is left out."""
    return [(name, value) for name, value in _flat("", environment) if value.strip()]


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flat(f"{prefix}.{key}" if prefix else str(key), item)
    elif isinstance(value, (list, tuple)):
        yield prefix, ", ".join(map(str, value))
    else:
        yield prefix, "" if value is None else str(value)
