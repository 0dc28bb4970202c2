"""Documents of what was not run: the environment of a run, as everybody needs it who wants to see the same, and an inspected model."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from dtypedoctor.diagnosis.checkpoint import Subject
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.diagnosis.wording import listed
from dtypedoctor.errors import WorkerDiedError
from dtypedoctor.plugins import left_out
from dtypedoctor.report.document import (
    Block,
    Check,
    Document,
    Heading,
    Items,
    Outcome,
    Paragraph,
    Section,
    Table,
    named,
)
from dtypedoctor.report.to_json import plain


def environment_document(environment: Mapping[str, Any]) -> Document:
    """The table that every report carries, by itself."""
    return Document(
        name="environment",
        sections=(Section("", (environment_table(environment),)),),
        data=lambda: plain(environment),
    )


def environment_table(environment: Mapping[str, Any]) -> Table:
    """Names and values."""
    return Table((), tuple((named(key), named(value)) for key, value in environment_rows(environment)))


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


SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A model, and what the static checks found in it."""

    subject: Subject
    findings: tuple[Finding, ...]

    @property
    def gaps(self) -> tuple[str, ...]:
        """What was not inspected, and the plug-ins that could not be used."""
        return (*self.subject.gaps, *(one.gap for one in left_out()))

    @property
    def troubled(self) -> bool:
        """Whether there is more than information."""
        return any(finding.severity is not Severity.INFO for finding in self.findings)

    @property
    def status(self) -> str:
        """The verdict in one word, as ``report.json`` has it; of weights that are not there nothing is known."""
        return "findings" if self.troubled else "unknown" if self.subject.partial else "healthy"


def census(subject: Subject) -> dict[str, Any]:
    """Tensors and elements per dtype, the names of those that differ from most, quantization states per dtype, and the dtypes that the config names."""
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
        "differing": {
            dtype: [tensor.name for tensor in subject.floating if tensor.dtype == dtype]
            for dtype in sorted(tensors)
            if dtype != subject.stored_dtype
        },
        "config_dtype": subject.config_dtype,
        "load_dtype": subject.load_dtype,
    }


def inspection_document(inspection: Inspection) -> Document:
    """The census, each finding, and what was not inspected."""
    findings, gaps = inspection.findings, inspection.gaps
    sections = [Section("Dtypes", tuple(_census(inspection.subject)), anchor="dtypes")]
    for number, finding in enumerate(findings, 1):
        blocks: list[Block] = [Paragraph(finding.summary)]
        blocks += [Heading("cause"), Paragraph(finding.cause)]
        blocks += [Heading("evidence"), Items(finding.evidence)] if finding.evidence else []
        sections.append(Section(f"{finding.severity.upper()} {finding.id}", tuple(blocks), anchor=f"finding-{number}"))
    if gaps:
        sections.append(Section("Not inspected", (Items(gaps),), anchor="gaps"))
    return Document(
        name=inspection.subject.name,
        headline=inspection.subject.name,
        status=_shown(inspection),
        good=inspection.status == "healthy",
        sections=tuple(sections),
        checks=tuple(
            Check(
                name=f"finding {finding.id}",
                outcome=Outcome.PASSED if finding.severity is Severity.INFO else Outcome.FAILED,
                kind=finding.id,
                message=finding.summary,
                text=finding.cause,
            )
            for finding in findings
        ),
        next_command=f"dtypedoctor explain {findings[0].id}" if findings else "",
        data=lambda: {
            "schema": SCHEMA,
            "model": inspection.subject.name,
            "status": inspection.status,
            "census": census(inspection.subject),
            "findings": plain(findings),
            "coverage": list(gaps),
        },
    )


def _shown(inspection: Inspection) -> str:
    if inspection.status == "healthy":
        return "NOTED" if inspection.findings else "NOTHING FOUND"
    return "FOUND" if inspection.troubled else "UNKNOWN"


def _census(subject: Subject) -> Iterator[Table | Items | Paragraph]:
    counted = census(subject)
    where = "in memory" if subject.loaded else "stored"
    rows = tuple(
        (dtype, f"{numbers['tensors']:,}", f"{numbers['elements']:,}", where)
        for dtype, numbers in counted["tensors"].items()
    )
    lines = [
        f"{state['weights']} {state['kind']} weights, quant_state.dtype {state['dtype']}{', nested statistics' if state['nested'] else ''}"
        for state in counted["quant_states"]
    ]
    lines += [f"config says {subject.config_dtype}"] if subject.config_dtype else []
    lines += [f"loaded as {subject.load_dtype}"] if subject.load_dtype and not subject.loaded else []
    others = {dtype: names for dtype, names in counted["differing"].items() if names}
    lines += [f"in {dtype}: {listed(names)}" for dtype, names in others.items()]
    if rows:
        yield Table(("dtype", "tensors", "elements", ""), rows)
    if lines:
        yield Items(tuple(lines))
    if danger := _DANGERS.get(subject.load_dtype or ""):
        yield Paragraph(f"In danger in {subject.load_dtype}: {danger}")


_DANGERS = {
    "float16": "what goes beyond 65,504 becomes inf, gradients below 6e-08 become 0. Train in bfloat16, or with autocast and a GradScaler.",
    "bfloat16": "updates of less than 0.2% of a weight are rounded away; with Adam, weights above some 500 learning rates do not move. "
    "Train float32 weights under autocast.",
}
"""What a checkpoint has to fear in a dtype, whatever it holds; what it holds is a finding."""


_WORKER = "dtypedoctor.worker.environment"
_TIME_LIMIT = 180


def survey() -> dict[str, Any]:
    """Versions, devices, settings and the environment variables that matter, as a run would record them.

    Raises:
        WorkerDiedError: the process left no description, usually because torch cannot be imported.
    """
    # -P: a torch.py or datasets folder in the working directory must not be taken for the real one
    command = [sys.executable, "-P", "-m", _WORKER]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TIME_LIMIT, check=False
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except subprocess.TimeoutExpired:
        how, log = f"after {_TIME_LIMIT} s without an answer", ""
    except (IndexError, ValueError):
        how, log = f"with status {done.returncode}", done.stderr
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    raise WorkerDiedError(
        f"the process that describes the machine ended {how}" + (f": {last[:300]}" if last else ""),
        "Try `python -c 'import torch'` with the same interpreter.",
    )
