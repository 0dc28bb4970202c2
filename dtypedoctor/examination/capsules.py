"""Chooses the capsule of the call that is found to fail among those that a run has left beside its trace, and puts it into the run directory."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from dtypedoctor.analysis import Analysis, analysis_of
from dtypedoctor.diagnosis.incidents import GRADIENTS
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import parse_json, read_file, write_file
from dtypedoctor.redaction.messages import ELIDED
from dtypedoctor.redaction.redact import redact, short_paths, without_process_secrets
from dtypedoctor.redaction.secrets import SECRET
from dtypedoctor.replay.capsule import (
    CAPSULE,
    CAPSULE_TENSORS,
    MODEL,
    Capsule,
    NoCapsule,
    is_described,
    read_capsule,
)
from dtypedoctor.runner.run import Run
from dtypedoctor.trace.ranks import BEFORE
from dtypedoctor.unpatched import to_json

CAPSULE_LIMIT = 64 << 20
"""Bytes that a capsule may take if nobody says otherwise."""

DIRECTORY = "capsule"
_NUMBER = re.compile(r"\d+")
_COMPARED = 80
"""Letters of two messages that are compared; of what a program fills in the recorded one has nothing."""
_IN_PLACE = re.compile(r"capsule-\d{1,18}-.*\.json")
"""Names of the calls that the process itself has kept."""
_FINITE = frozenset({
    "norm-square-overflow", "masked-overflow", "silent-rescue", "float-to-int-cast", "router-flip", "rounded-rotary-buffer",
})  # fmt: skip
"""Findings about one call of which everything that is returned may be finite."""
_GIVEN = ("nonfinite-input",)
"""Findings of which the input of a call is what is not finite."""
_SEEN_IN_OPERATOR = (
    "float16-overflow",
    "backward-overflow",
    "domain-error",
    "fully-masked-row",
    "operand-dtype-mismatch",
    "unsupported-dtype",
    "norm-square-overflow",
)
"""Findings that one operator shows, without what is around it."""
_FIXES_OF_ANY_CALL = ("keep-float32", "bfloat16")
"""Tried on every failing call, beside what the finding proposes."""
_CALLS = ("forward", "generate", "recompute", "backward")
"""Phases in which a module call can fail."""


def caught_in(run: Run, findings: Sequence[Finding], limit: int = CAPSULE_LIMIT) -> Capsule | NoCapsule | None:
    """The capsule of what failed in ``run``, or why there is none; None where nothing failed in it.

    Args:
        run: has left what it kept beside its trace.
        findings: of the run, the root cause first.
        limit: bytes that the capsule may take.
    """
    failures = [finding for finding in findings if finding.severity is not Severity.INFO]
    operators = sorted(run.directory.glob("operator-*.json"))
    try:
        named = {path: _IN_PLACE.fullmatch(path.name) for path in run.directory.glob("capsule-*-*.json")}
        made = sorted((path for path, match in named.items() if match), key=lambda path: int(path.name.split("-")[1]))
        if not failures:
            _discard(made)
            return None
        try:
            operator = _operator_of(failures[0], operators)
            if operator is not None:
                description = {**_description(operator), "finding": _finding(run, failures[0])}
                return _placed(description, _tensors_of(operator), _place(run))
            return _chosen(made, _wanted(run, failures[0], limit), _place(run))
        except UsageError as error:
            return NoCapsule(why=error.message)
        except (OSError, ValueError) as error:
            return NoCapsule(why=f"what the process has left cannot be read ({error})")
        finally:
            _discard(made)
    finally:
        _discard(operators)


def _place(run: Run) -> Path:
    """Where the capsule of ``run`` belongs: beside the report, also where one of several processes failed, which records further inside."""
    inside = (run.directory, *run.directory.parents)
    return next((path for path in inside if path.name == BEFORE), run.directory).with_name(DIRECTORY)


def _wanted(run: Run, finding: Finding, limit: int) -> dict[str, Any]:
    """Which call to choose: how it fails, what it raises and where, the finding, the fixes that matter, and how many bytes it may take.

    Raises:
        UsageError: no module call fails.
    """
    if finding.phase not in _CALLS:
        raise UsageError(f"the finding is about the {finding.phase} phase, and only a module call can be kept")
    analysis = analysis_of(run.trace)
    # An exception that the program has caught, and did not get past, fails the call as one that ends it.
    raised = analysis.raised if analysis.measured_incident is None else None
    if raised is not None and raised.caught and finding.id in _FINITE:
        raised = None
    if finding.fqn is None:
        raise UsageError("it fails outside of module calls")
    kind = "raised" if raised is not None else "backward" if finding.phase == "backward" else "nonfinite"
    if kind == "nonfinite" and finding.id in _FINITE:
        kind = "silent"
    elif kind == "nonfinite" and analysis.measured_incident is None:
        raise UsageError("nothing that the call returns shows it")
    if kind == "nonfinite" and _is_of_gradient(analysis):
        kind = "backward"
    return {
        "kind": kind,
        "limit": limit,
        "finding": _finding(run, finding),
        "raised": None if raised is None else f"{raised.type}: {raised.message}",
        "raised_in": [] if raised is None else raised.modules[-1:],
        "fixes": list(dict.fromkeys([*finding.remedies, *_FIXES_OF_ANY_CALL])),
    }


def _finding(run: Run, finding: Finding) -> dict[str, Any]:
    """What a capsule says of what was found."""
    return {
        "id": finding.id,
        "op": finding.op,
        "phase": finding.phase,
        "dtype": finding.dtype,
        "fqn": finding.fqn,
        "source": finding.source,
        "summary": finding.summary,
        "versions": run.trace.environment.get("versions", {}),
    }


def _operator_of(finding: Finding, operators: Sequence[Path]) -> Path | None:
    """The capsule of the operator outside of modules that is to blame; None where it is none, or alone does not show what is found."""
    if finding.fqn is not None or finding.id not in _SEEN_IN_OPERATOR:
        return None
    kept = [(path, _description(path)["operator"] or {}) for path in operators]
    named = [(path, one) for path, one in kept if one.get("op") == finding.op]
    at_line = [path for path, one in named if one.get("source") == finding.source]
    return next(iter([*at_line, *(path for path, _ in named)]), None)


def _is_of_gradient(analysis: Analysis) -> bool:
    """Whether the first thing that is not finite and matters is a gradient: the call itself returned finite values."""
    incident = analysis.measured_incident
    return incident is not None and incident.site is not None and incident.site.kind in GRADIENTS


def _chosen(made: Sequence[Path], wanted: dict[str, Any], directory: Path) -> Capsule | NoCapsule:
    """The first capsule that fails as the finding says."""
    for path in made:
        description = _description(path)
        tensors = _tensors_of(path)
        if description["kind"] != wanted["kind"] or not _is_of(description, wanted):
            continue
        if "why" in description:
            return NoCapsule(why=str(description["why"]))
        if not tensors.is_file():
            continue
        size = tensors.stat().st_size
        if size > wanted["limit"]:
            return NoCapsule(why=f"it takes {size:,} bytes, and --capsule-limit is {wanted['limit']:,}")
        # Which fixes are wanted was not known where they were tried
        tried = {row["fix"]: row for row in description.get("fixes", ())}
        fixes = [tried[fix] for fix in wanted["fixes"] if fix in tried]
        return _placed({**description, "finding": wanted["finding"], "fixes": fixes}, tensors, directory)
    return NoCapsule(why="by itself no module around the failing operator fails")


def _description(path: Path) -> dict[str, Any]:
    """What the process has written of a call beside its trace.

    Raises:
        OSError: it cannot be read.
        ValueError: it is damaged, or something else has the name.
    """
    description = parse_json(read_file(path))
    if not isinstance(description, dict) or not ("why" in description or is_described(description, but="finding")):
        raise ValueError(f"{path.name} is damaged")
    operator = description.get("operator")
    return {"fqn": "", "kind": "", **description, "operator": operator if isinstance(operator, dict) else None}


def _discard(paths: Sequence[Path]) -> None:
    """Takes away what is not to stay beside a trace."""
    for path in (*paths, *map(_tensors_of, paths)):
        with suppress(OSError):  # it was moved, or is a folder
            path.unlink(missing_ok=True)


def _is_of(description: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Whether a call that was kept is around what is found, and has raised what the run raised, whatever sizes either names, or has got inputs
    that are what is found."""
    around = f"{description['fqn']}." if description["fqn"] else ""
    places = (wanted["finding"]["fqn"] or "", *wanted["raised_in"])
    if not any(f"{fqn}.".startswith(around) for fqn in places):
        return False
    raised = wanted["raised"]
    if description.get("given") and wanted["finding"]["id"] not in _GIVEN:
        return False
    if raised is None or "error" not in description:
        return True
    said, again = (_NUMBER.sub("N", text).split("\n")[0] for text in (raised, description["error"]))
    return bool(again.startswith(said.partition(ELIDED)[0][:_COMPARED]))


def _tensors_of(path: Path) -> Path:
    return path.with_suffix(".safetensors")


def _placed(description: dict[str, Any], tensors: Path, directory: Path) -> Capsule:
    """The capsule, moved to where it belongs, without secrets and paths of this machine."""
    public = {**redact(description), "source": _without_secrets(description["source"])}
    directory.mkdir()
    tensors.rename(directory / CAPSULE_TENSORS)
    write_file(directory / CAPSULE, to_json(public))
    return read_capsule(directory)


_IN_QUOTES = re.compile(rf"""["'][^"']*{re.escape(SECRET)}""")


def _without_secrets(source: str) -> str:
    """Source text without secrets, which still is a program: where a name in it looks like one, only texts in quotes are masked.

    Raises:
        UsageError: it is none.
    """
    masked = short_paths(without_process_secrets(source))
    if _is_program(masked):
        return masked
    old, new = source.split("\n"), masked.split("\n")
    if len(old) == len(new):
        lines = [after if _IN_QUOTES.search(after) else before for before, after in zip(old, new, strict=True)]
        if _is_program("\n".join(lines)):
            return "\n".join(lines)
    raise UsageError("the source text of its classes is no program without what looks like a secret in it")


def _is_program(text: str) -> bool:
    try:
        compile(text, "source", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def is_replay(scenario: Mapping[str, Any]) -> bool:
    """Whether a scenario, as report.json has it, makes the call of a capsule."""
    return str((scenario["steps"][0].get("model") or {}).get("name")).startswith(MODEL)


def same_verdict(capsule: Capsule, findings: Sequence[Finding]) -> str:
    """Whether a replay comes to what was found in the run, as a sentence."""
    wanted = (capsule.finding.get("id"), capsule.finding.get("op"))
    found = [(finding.id, finding.op) for finding in findings if finding.severity is not Severity.INFO]
    if capsule.operator is not None:  # its operands are the inputs of all that is replayed
        found = [("operand-dtype-mismatch" if name == "model-input-dtype" else name, op) for name, op in found]
    if not found:
        return f"The replay does not fail; the run failed with {wanted[0]}."
    if found[0] == wanted:
        return f"Same verdict as in the run: {wanted[0]}" + (f", {wanted[1]}." if wanted[1] else ".")
    return (
        f"Another verdict than in the run: {found[0][0]}, {_op(found[0][1])}; in the run {wanted[0]}, {_op(wanted[1])}."
    )


def _op(name: str | None) -> str:
    return name or "no operator known"
