"""What is said of a model that has not run: the census of its dtypes, and the static findings."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.static.subject import Subject
from dtypedoctor.report.text import one_line, paragraphs
from dtypedoctor.report.to_json import plain

SCHEMA = 1
_STYLES = {Severity.ERROR: "bold red", Severity.WARNING: "bold yellow", Severity.INFO: "bold blue"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A model, and what the static checks found in it."""

    subject: Subject
    findings: tuple[Finding, ...]

    @property
    def troubled(self) -> bool:
        """Whether there is more than information."""
        return any(finding.severity is not Severity.INFO for finding in self.findings)


def census(subject: Subject) -> dict[str, Any]:
    """Tensors and elements per dtype, quantisation states per dtype, and the dtypes that the config names."""
    tensors = Counter(tensor.dtype for tensor in subject.tensors)
    elements: Counter[str] = Counter()
    for tensor in subject.tensors:
        elements[tensor.dtype] += tensor.elements
    states = Counter((state.kind, state.dtype, state.nested) for state in subject.quant_states)
    return {
        "tensors": {dtype: {"tensors": count, "elements": elements[dtype]} for dtype, count in sorted(tensors.items())},
        "quant_states": [
            {"kind": kind, "dtype": dtype, "nested": nested, "weights": count}
            for (kind, dtype, nested), count in states.most_common()
        ],
        "config_dtype": subject.config_dtype,
        "load_dtype": subject.load_dtype,
    }


def render_inspection_json(inspection: Inspection) -> str:
    """The inspection as JSON: ``schema``, ``model``, ``status``, ``census``, ``findings``, ``coverage``."""
    document = {
        "schema": SCHEMA,
        "model": inspection.subject.name,
        "status": "findings" if inspection.troubled else "healthy",
        "census": census(inspection.subject),
        "findings": plain(inspection.findings),
        "coverage": list(inspection.subject.gaps),
    }
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def render_inspection(inspection: Inspection, console: Console) -> None:
    """Prints the inspection for a person."""
    _print(console, inspection.subject.name, "bold")
    for line in _census_lines(inspection.subject):
        _print(console, line, indent=2)
    for finding in inspection.findings:
        console.print()
        _print(console, f"{finding.severity.value.upper()} {finding.id}", _STYLES[finding.severity])
        for text in (finding.summary, finding.cause, *(f"- {line}" for line in finding.evidence)):
            _print(console, text, indent=2)
    console.print()
    if not inspection.findings:
        _print(console, "Nothing found.", "bold green")
    for gap in inspection.subject.gaps:
        _print(console, f"not looked at: {gap}")
    _print(console, f"Next: dtypedoctor explain {inspection.findings[0].id if inspection.findings else 'FINDING_ID'}")


def _census_lines(subject: Subject) -> Iterator[str]:
    counted = census(subject)
    where = "in memory" if subject.loaded else "stored"
    for dtype, numbers in counted["tensors"].items():
        yield f"{dtype:<14} {numbers['tensors']:>6} tensors {numbers['elements']:>16,} elements  {where}"
    for state in counted["quant_states"]:
        nested = ", nested statistics" if state["nested"] else ""
        yield f"{state['weights']} {state['kind']} weights, quant_state.dtype {state['dtype']}{nested}"
    if counted["config_dtype"]:
        yield f"config says {counted['config_dtype']}"
    if counted["load_dtype"] and not subject.loaded:
        yield f"loaded as {counted['load_dtype']}"


def _print(console: Console, text: str, style: str = "", indent: int = 0) -> None:
    line = Text(paragraphs(text) if "\n" in text else one_line(text, 2000), style=style, overflow="fold")
    console.print(Padding(line, (0, 0, 0, indent), expand=False), highlight=False)
