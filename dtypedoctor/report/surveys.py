"""Documents of what was not run: the environment of a run, as everybody needs it who wants to see the same, and an inspected model."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dtypedoctor import __version__
from dtypedoctor.diagnosis.checkpoint import Subject
from dtypedoctor.diagnosis.rule import Finding, Severity
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
from dtypedoctor.report.model import Report
from dtypedoctor.report.run_facts import finding_anchor
from dtypedoctor.report.text import one_line
from dtypedoctor.report.to_json import plain
from dtypedoctor.scenario.model import Scenario, Script
from dtypedoctor.trials.remedies import exec_option


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


_TORCH_INDEX = "https://download.pytorch.org/whl/"
_TORCH_BUILD = re.compile(r"(?P<version>[\w.]+)\+(?P<build>cpu|xpu|cu\d+|rocm[\d.]+)")
"""A version of a package that PyTorch's own index has: a local label names what it was built for, and the folder it lies in
(https://docs.pytorch.org/get-started/locally/)."""


def install_command(environment: Mapping[str, Any]) -> str:
    """``pip install`` of dtypedoctor and of the recorded versions, for a shell.

    No package index has dtypedoctor, so the shell variable ``DTYPEDOCTOR`` says where it is; without one the shell stops and says so.
    Builds of torch are taken from the index that has them, because a CPU build and a CUDA build do not compute the same.
    Of other local labels (``+git1a2b3c4``), which no index knows, only the version is kept.
    """
    recorded = environment.get("versions")
    versions = {name: str(version) for name, version in recorded.items()} if isinstance(recorded, Mapping) else {}
    indices = dict.fromkeys(_indices(versions))
    pins = [f"{name}=={_pinned(version)}" for name, version in versions.items()]
    options = shlex.join(["pip", "install", *(f"--extra-index-url={index}" for index in indices)])
    return f"{options} {_DOCTOR} {shlex.join(pins)}".rstrip()


_DOCTOR = f'"${{DTYPEDOCTOR:?set it to the path of a wheel or checkout of dtypedoctor {__version__}}}"'


def _indices(versions: Mapping[str, str]) -> Iterator[str]:
    for version in versions.values():
        if build := _TORCH_BUILD.fullmatch(version):
            nightly = "nightly/" if ".dev" in build["version"] else ""
            yield f"{_TORCH_INDEX}{nightly}{build['build']}"


def _pinned(version: str) -> str:
    return version if _TORCH_BUILD.fullmatch(version) else version.split("+")[0]


ELSEWHERE = "On another machine: a script that installs these versions and runs the same command"
"""What formats call :func:`reproduction_script`."""

_OWN = "dtypedoctor "
"""How the command of a report begins, unless a program watched itself."""


def reproduction_script(report: Report) -> str:
    """A POSIX shell script for another machine; empty where the report does not say what was run.

    It holds the scenario itself. A user's script is not part of a report, so there it says what has to be put beside it.
    """
    lines = list(_running(report))
    if not lines:
        return ""
    head = ("#!/bin/sh", "set -eu", "python3 -m venv reproduce && . reproduce/bin/activate")
    return "\n".join((*head, install_command(report.environment), *lines, ""))


_KERNEL = "ipykernel_launcher.py"
"""The program that a notebook's kernel runs."""


def _running(report: Report) -> Iterator[str]:
    values = plain(report.scenario)
    if not values:
        return
    try:
        scenario = Scenario.model_validate(values)
    except ValidationError:  # a report may be older than the scenario's present keys, or redacted
        import yaml  # imported where a scenario is shown: a report of a script has none

        yield from _here_document(yaml.safe_dump(values, sort_keys=False, width=100), report)
        return
    workload = scenario.steps[0].workload
    if isinstance(workload, Script):
        if Path(workload.path or "").name == _KERNEL:
            return  # a notebook: no command line runs its cells again
        what = workload.path if workload.path != "-" else "The program on standard input"
        if what is not None or workload.module is not None:
            yield f"# {one_line(what or f'The module {workload.module}')} is not part of this report: put it here."
        itself = report.command and not report.command.startswith(_OWN)
        yield report.command if itself else _exec(scenario, workload)
    else:
        from dtypedoctor.scenario.loading import to_yaml

        yield from _here_document(to_yaml(scenario), report)


def _here_document(scenario: str, report: Report) -> Iterator[str]:
    end = "END_OF_SCENARIO"
    while end in scenario:  # a here-document ends at the first line that is its mark
        end += "_"
    file = shlex.quote(f"{report.name}.yaml")  # a scenario has the name of its file
    yield from (f"cat > {file} <<'{end}'", scenario.rstrip("\n"), end)
    yield f"dtypedoctor {'run' if report.bisection is None else 'bisect'} {file}"


def _exec(scenario: Scenario, script: Script) -> str:
    """The command that watches the script in the same way; its options say what differs from the plain one."""
    words = ["dtypedoctor", "exec"]
    if scenario.distributed is not None:
        words += ["--nproc-per-node", str(scenario.distributed.processes)]
    if scenario.watch_every != 1:
        words += ["--every-n-steps", str(scenario.watch_every)]
    if scenario.overhead_budget != "off":
        words += ["--overhead-budget", scenario.overhead_budget]
    for remedy in scenario.remedies:
        words += exec_option(remedy)
    words += ["-m", *script.launcher] if script.launcher else []
    words += ["-m", script.module] if script.module else ["-c", script.code] if script.code else [str(script.path)]
    return shlex.join([*words, *script.args])


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


def census(subject: Subject) -> dict[str, Any]:
    """Tensors and elements per dtype, quantization states per dtype, and the dtypes that the config names."""
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


def inspection_document(inspection: Inspection) -> Document:
    """The census, each finding, and what was not inspected."""
    findings, gaps = inspection.findings, inspection.gaps
    sections = [Section("Dtypes", tuple(_census(inspection.subject)), anchor="dtypes")]
    sections += [_finding(position, finding) for position, finding in enumerate(findings)]
    if gaps:
        sections.append(Section("Not inspected", (Items(gaps),), anchor="gaps"))
    return Document(
        name=inspection.subject.name,
        headline=inspection.subject.name,
        status=_verdict(inspection),
        good=not inspection.troubled,
        sections=tuple(sections),
        checks=tuple(map(_check, findings)),
        next_command=f"dtypedoctor explain {findings[0].id}" if findings else "",
        data=lambda: _data(inspection),
    )


def _verdict(inspection: Inspection) -> str:
    if inspection.troubled:
        return "FOUND"
    return "NOTED" if inspection.findings else "NOTHING FOUND"


def _census(subject: Subject) -> Iterator[Table | Items]:
    counted = census(subject)
    where = "in memory" if subject.loaded else "stored"
    rows = tuple(
        (dtype, f"{numbers['tensors']:,}", f"{numbers['elements']:,}", where)
        for dtype, numbers in counted["tensors"].items()
    )
    if rows:
        yield Table(("dtype", "tensors", "elements", ""), rows)
    lines = tuple(_dtypes_besides(subject, counted))
    if lines:
        yield Items(lines)


def _dtypes_besides(subject: Subject, counted: dict[str, Any]) -> Iterator[str]:
    for state in counted["quant_states"]:
        nested = ", nested statistics" if state["nested"] else ""
        yield f"{state['weights']} {state['kind']} weights, quant_state.dtype {state['dtype']}{nested}"
    if counted["config_dtype"]:
        yield f"config says {counted['config_dtype']}"
    if counted["load_dtype"] and not subject.loaded:
        yield f"loaded as {counted['load_dtype']}"


def _finding(position: int, finding: Finding) -> Section:
    blocks: list[Block] = [
        Paragraph((finding.summary, finding_anchor(finding))),
        Heading("cause"),
        Paragraph(finding.cause),
    ]
    if finding.evidence:
        blocks += [Heading("evidence"), Items(finding.evidence)]
    return Section(f"{finding.severity.value.upper()} {finding.id}", tuple(blocks), anchor=f"finding-{position + 1}")


def _check(finding: Finding) -> Check:
    return Check(
        name=f"finding {finding.id}",
        outcome=Outcome.PASSED if finding.severity is Severity.INFO else Outcome.FAILED,
        kind=finding.id,
        message=finding.summary,
        text=finding.cause,
    )


def _data(inspection: Inspection) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "model": inspection.subject.name,
        "status": "findings" if inspection.troubled else "healthy",
        "census": census(inspection.subject),
        "findings": plain(inspection.findings),
        "coverage": list(inspection.gaps),
    }


_WORKER = "dtypedoctor.worker.environment"
_TIME_LIMIT = 180


def survey() -> dict[str, Any]:
    """Versions, devices, settings and the environment variables that matter, as a run would record them.

    Raises:
        WorkerDiedError: the process left no description, usually because torch cannot be imported.
    """
    with tempfile.TemporaryDirectory() as place:
        result, log = Path(place, "survey.json"), Path(place, "log.txt")
        # -P: a torch.py or datasets folder in the working directory must not be taken for the real one
        command = [sys.executable, "-P", "-m", _WORKER, str(result)]
        with log.open("wb") as streams:
            try:
                code = subprocess.run(
                    command,
                    stdout=streams,
                    stderr=streams,
                    timeout=_TIME_LIMIT,
                    check=False,
                    env=os.environ | {"PYTHONSAFEPATH": "1"},  # torch's own tool starts `python -m pip`
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        try:
            found = json.loads(result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise _died(code, log.read_text(encoding="utf-8", errors="replace")) from None
    assert isinstance(found, dict)
    return found


def _died(code: int | None, log: str) -> WorkerDiedError:
    how = f"after {_TIME_LIMIT} s without an answer" if code is None else f"with status {code}"
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    return WorkerDiedError(
        f"the process that describes the machine ended {how}" + (f": {last[:300]}" if last else ""),
        "Try `python -c 'import torch'` with the same interpreter.",
    )
