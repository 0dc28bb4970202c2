"""The document about a bisection: the answer first, then what it rests on, from what report.json holds of it.

A report may be older than a key, so none but those of the first contract are taken for granted.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from dtypedoctor.report.document import Block, Code, Facts, Heading, Line, Look, Section, Table, Words, named
from dtypedoctor.report.magnitude_table import shared_prefix
from dtypedoctor.report.model import Report
from dtypedoctor.report.text import ABSENT, counted, duration, memory, number, one_line, ratio

_VERDICT_HEADER = ("mode", "outcome", "phase", "module", "absmax")
_VERDICT_NOTE = (
    "module: where it fails, else where it comes closest to its dtype's max; absmax: the largest finite magnitude there. "
    "Compiled code is measured at the model's output only."
)

_Found = Mapping[str, Any]
_LOOKS = {"pass": Look.GOOD, "fail": Look.BAD, "unresolved": Look.WARN}


def bisection_part(report: Report) -> Section:
    """What was found; empty where there is no bisection, or nothing to bisect."""
    found = report.bisection
    if found is None or found.get("end") == _HEALTHY:
        return Section("Bisection", ())
    blocks: list[Block] = [Facts(tuple((label, named(value)) for label, value in bisection_summary(found)))]
    verdicts = bisection_verdicts(found)
    if verdicts:
        shared = shared_prefix([module for _, _, _, module, _ in verdicts if "." in module])
        rows: tuple[tuple[Line, ...], ...] = tuple(
            (mode, Words(outcome, _LOOKS.get(outcome, Look.PLAIN)), phase, _shortened(module, shared), absmax)
            for mode, outcome, phase, module, absmax in verdicts
        )
        blocks += [Heading("verdict of each mode"), Table(_VERDICT_HEADER, rows, _VERDICT_NOTE)]
    if remedy := remedy_yaml(found):
        blocks += [Heading("fix, to add to the scenario"), Code(remedy, "yaml")]
    return Section("Bisection", tuple(blocks), "bisection")


def _shortened(module: str, shared: int) -> str:
    return f"…{module[shared:]}" if shared and "." in module else module


def bisection_summary(bisection: _Found) -> list[tuple[str, str]]:
    """What a bisection found, as labelled values."""
    rows = [
        ("culprits", _listed(bisection.get("culprits"))),
        ("corrections", _corrections(bisection)),
        ("minimal", _minimal(bisection)),
        ("probes", _probes(bisection)),
        *_doubts(bisection),
        *_cost(bisection.get("cost")),
        *_reproduction(bisection.get("reproduction")),
    ]
    return [(label, value) for label, value in rows if value]


def bisection_verdicts(bisection: _Found) -> list[tuple[str, str, str, str, str]]:
    """Mode, outcome, phase, module and absmax of each verdict."""
    usual = bisection.get("workload")
    return [
        (_mode(v, usual), _word(v, "outcome"), _phase(v), _module(v), _magnitude(v))
        for v in bisection.get("verdicts") or ()
    ]


def remedy_yaml(bisection: _Found) -> str:
    """What to add to a scenario to fix it, as YAML; empty where no fix is known."""
    remedy = bisection.get("remedy")
    text: str = yaml.safe_dump(remedy, sort_keys=False, width=200) if isinstance(remedy, Mapping) else ""
    return text.rstrip("\n")


def _corrections(bisection: _Found) -> str:
    offered = bisection.get("offered") or ()
    needed = _listed(bisection.get("corrections"))
    return f"{needed} ({len(offered)} offered)" if offered else needed


def _minimal(bisection: _Found) -> str:
    if not bisection.get("one_minimal"):
        return "not checked" if bisection.get("end") not in (None, "found") else "no"
    return "yes: without any one of them the failure recurs"


def _probes(bisection: _Found) -> str:
    parts = [str(bisection.get("probes", ABSENT))]
    if bisection.get("candidates"):
        parts.append(f"for {counted(int(bisection['candidates']), 'candidate')}")
    if bisection.get("workload"):
        parts.append(f"by {bisection['workload']}")
    if isinstance(bisection.get("probe_seconds"), (int, float)):
        parts.append(f"(median {duration(float(bisection['probe_seconds']))})")
    return one_line(" ".join(parts), 300)


def _doubts(bisection: _Found) -> Iterator[tuple[str, str]]:
    """What the reader has to know before believing the rest."""
    for line in bisection.get("flaky") or ():
        yield "flaky", f"repeated runs differ: {line}"
    if bisection.get("unresolved"):
        yield "unresolved", f"{counted(int(bisection['unresolved']), 'probe')} failed differently"
    if bisection.get("monotone") is False:
        yield "not monotone", "a healthy run failed with more modules in float32"
    if bisection.get("note"):
        yield "note", str(bisection["note"])


def _cost(cost: object) -> Iterator[tuple[str, str]]:
    if not isinstance(cost, Mapping):
        return
    size, ratio_of_times = cost.get("memory_bytes"), cost.get("step_time_ratio")
    peak = f", {_peak(size)} at the peak" if isinstance(size, int) else ""
    seconds = f" ({duration(cost['step_time'])})" if cost.get("step_time") else ""
    step = f"; step time {ratio(ratio_of_times)}{seconds}" if ratio_of_times else ""
    yield "cost in float32", f"{_more(cost.get('parameter_bytes') or 0)} of weights{peak}{step}"


def _peak(size: int) -> str:
    """The peak of a process moves by itself, so little is no more than nothing."""
    return _more(size) if abs(size) >= _MEASURABLE else f"less than {memory(_MEASURABLE)}"


def _more(size: int) -> str:
    return f"{'+' if size > 0 else ''}{memory(size)}"


_MEASURABLE = 1 << 20
_HEALTHY = "healthy"


def _reproduction(found: object) -> Iterator[tuple[str, str]]:
    if not isinstance(found, Mapping):
        return
    if found.get("script"):
        size = memory(int(found.get("bytes") or 0))
        yield "reproduction", f"{found['script']} ({size} of tensors); verified, it prints: {found.get('said')}"
    else:
        yield "reproduction", f"none: {found.get('reason')}"


def _listed(names: Sequence[object] | None) -> str:
    return ", ".join(map(str, names or ())) or "none"


def _mode(verdict: _Found, usual: object) -> str:
    """The mode, and what was run where that is not what the others ran and not the mode's name itself."""
    mode, workload = str(verdict.get("mode") or ABSENT), verdict.get("workload")
    return one_line(mode if workload in (None, usual, mode) else f"{mode}: {workload}")


def _phase(verdict: _Found) -> str:
    step = verdict.get("step")
    return _word(verdict, "phase") + (f", step {step}" if step is not None and verdict.get("phase") else "")


def _module(verdict: _Found) -> str:
    return "the model's output" if verdict.get("fqn") == "" else _word(verdict, "fqn")


def _word(verdict: _Found, key: str) -> str:
    return one_line(str(verdict.get(key) or ABSENT))


def _magnitude(verdict: _Found) -> str:
    value = verdict.get("absmax")
    return number(float(value)) if isinstance(value, (int, float)) else ABSENT
