"""Tables of rotary frequencies that have lost bits."""

import struct
from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Confidence, Finding, Severity
from dtypedoctor.diagnosis.rule import Rule
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.subject import HALF, StaticTensor, Subject
from dtypedoctor.diagnosis.wording import module_of
from dtypedoctor.rules.silent.rounded_rotary_buffer import SPEC

ID = "rounded-rotary-buffer"
TABLES = ("inv_freq", "freqs_cis", "cos_cached", "sin_cached")
"""How models name their tables of frequencies."""


def check_rotary(subject: Subject) -> Iterator[Finding]:
    """Tables in half precision, and float32 tables all of whose values are those of a half-precision one."""
    for tensor in subject.tensors:
        if not tensor.name.endswith(TABLES):
            continue
        lost = tensor.dtype if tensor.dtype in HALF else rounded_to(tensor.values)
        if lost is not None:
            yield _finding(tensor, lost)
            return  # one table stands for all layers


def _finding(tensor: StaticTensor, lost: str) -> Finding:
    now = f"is {lost}" if tensor.dtype == lost else f"is float32 and holds only values that {lost} has too"
    said = Statement(
        id=ID,
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        summary=f"The rotary frequencies were rounded to {lost}.",
        cause="An angle is a frequency times a position, so the rounding of the frequency grows with the position. "
        "A later cast to float32 does not bring the bits back.",
        evidence=(f"{tensor.name} {now}.",),
    )
    return located(said, phase="static", fqn=module_of(tensor.name), dtype=tensor.dtype)


def rounded_to(values: tuple[float, ...]) -> str | None:
    """The half-precision dtype that every value survives, where there are enough values to say so; else None."""
    telling = [value for value in values if value not in (0.0, 1.0)]
    if len(telling) < 2:
        return None
    if all(_bits(value) & 0xFFFF == 0 for value in telling):
        return "bfloat16"
    return "float16" if all(_survives_float16(value) for value in telling) else None


def _bits(value: float) -> int:
    bits: int = struct.unpack("<I", struct.pack("<f", value))[0]
    return bits


def _survives_float16(value: float) -> bool:
    try:
        return bool(struct.unpack("<e", struct.pack("<e", value))[0] == value)
    except OverflowError:
        return False


RULES = (Rule(name="rotary-weights", specs=(SPEC,), inspect=check_rotary),)
