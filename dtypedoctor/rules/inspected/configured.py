"""Dtypes that the config, the files and the request do not agree on."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from dtypedoctor.diagnosis.finding import Confidence, Finding, Severity
from dtypedoctor.diagnosis.rule import Rule
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.subject import Subject, plain_dtype
from dtypedoctor.rules.checkpoint_dtype import SPEC

ID = "checkpoint-dtype-mismatch"


def check_configured(subject: Subject) -> Iterator[Finding]:
    """What is stored against what the config says, the config against its own parts, what is stored against the request."""
    stored, said = subject.stored_dtype, subject.config_dtype
    if subject.loaded or stored is None:
        return
    if said is not None and said != stored:
        yield _finding(
            Severity.WARNING,
            said,
            f"The files hold {stored} weights and the config says {said}.",
            f"Who loads without naming a dtype gets {said}: the weights are cast in silence{_harm(stored, said)}.",
            (_counts(subject), f"config: dtype is {said}."),
        )
    yield from _parts(subject.config, said)
    wanted = subject.intent.dtype
    if wanted is not None and wanted != stored and (stored, wanted) == ("bfloat16", "float16"):
        yield _finding(
            Severity.WARNING,
            wanted,
            "A bfloat16 checkpoint is loaded as float16, which has a smaller range.",
            "Weights and, more often, activations that bfloat16 holds become inf in float16 above 65504.",
            (_counts(subject), "It is to be loaded as float16."),
        )


def _parts(config: Mapping[str, Any], said: str | None) -> Iterator[Finding]:
    for name, part in config.items():
        other = plain_dtype(part.get("dtype") or part.get("torch_dtype")) if isinstance(part, dict) else None
        if other is not None and said is not None and other != said:
            yield _finding(
                Severity.INFO,
                other,
                f"{name} says {other} and the config as a whole {said}.",
                "Which of them wins depends on the version of the library and on how the model is loaded.",
                (f"dtype is {said}; {name}.dtype is {other}.",),
            )


def _harm(stored: str, said: str) -> str:
    if (stored, said) == ("bfloat16", "float16"):
        return ", and values above 65504 become inf"
    if (stored, said) == ("float16", "bfloat16"):
        return ", and 3 bits of each are lost for good"
    return ", and half of their bits are lost" if stored == "float32" else ""


def _counts(subject: Subject) -> str:
    tensors = Counter(tensor.dtype for tensor in subject.floating)
    return "Stored: " + ", ".join(f"{count} tensor(s) in {dtype}" for dtype, count in tensors.most_common()) + "."


def _finding(severity: Severity, dtype: str, summary: str, cause: str, evidence: tuple[str, ...]) -> Finding:
    said = Statement(
        id=ID,
        severity=severity,
        confidence=Confidence.LIKELY,
        summary=summary,
        cause=cause,
        evidence=evidence,
    )
    return located(said, phase="static", dtype=dtype)


RULES = (Rule(name="loaded-dtype", specs=(SPEC,), inspect=check_configured),)
