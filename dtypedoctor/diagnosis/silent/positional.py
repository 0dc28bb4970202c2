"""``rounded-rotary-buffer``: frequencies or positions that half precision has rounded."""

from collections.abc import Iterator
from dataclasses import replace

from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.statement import Statement, found_in
from dtypedoctor.diagnosis.wording import short
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trace.records.silent import RotaryTable, RoundedPositions

ID = "rounded-rotary-buffer"


def detect_rotary_tables(trace: Trace) -> Iterator[Finding]:
    """Rotary frequencies that equal their own rounding."""
    for seen in trace.observed(RotaryTable):
        what = seen.what
        restored = what.dtype != what.rounded_to
        was = f"has the dtype {what.dtype} again and still" if restored else f"is {what.dtype}, so it"
        said = Statement(
            id=ID,
            severity=Severity.WARNING,
            proven_by=(
                f"a table computed in float32 differs from the one that is read by up to {100 * what.deviation:.2g}%"
                if what.read
                else None
            ),
            summary=(
                f"The frequencies {short(what.name)} are rounded to {what.rounded_to}: at position "
                f"{what.position} an angle is off by {what.angle_error:.2g} rad."
            ),
            cause=(
                f"{what.name} {was} holds {what.rounded_to} values. Casting a whole model casts its buffers too. The error "
                "of a frequency is multiplied by the position; casting back does not bring the bits back."
            ),
            evidence=(
                (
                    f"{what.length} values from {what.first:.6g} to {what.last:.6g}, all equal to their own "
                    f"rounding to {what.rounded_to}."
                ),
                (
                    f"They are up to {100 * what.deviation:.2g} % off the geometric progression through the first and the "
                    "last, which a table in float32 follows."
                ),
            ),
        )
        yield replace(found_in(seen, said, dtype=what.dtype), phase="static", step=None)


def detect_rounded_positions(trace: Trace) -> Iterator[Finding]:
    """Positions of which half precision has made fewer."""
    for seen in trace.observed(RoundedPositions):
        what = seen.what
        said = Statement(
            id=ID,
            severity=Severity.WARNING,
            proven_by=f"the same positions in float32 are up to {what.largest_error:g} apart from those that are used",
            summary=(
                f"{short(seen.fqn)} counts positions in {what.dtype}: of {what.length} only {what.distinct} are left."
            ),
            cause=(
                f"{what.dtype} does not have every whole number above {_exact(what.dtype)}, so neighbouring tokens of a "
                "longer text share a position. Count in int64 or float32, and cast what is computed from the positions."
            ),
            evidence=(
                f"{what.op} at {what.source} rounds them by up to {what.largest_error:g}.",
                f"{what.used_by} at {what.used_at} computes with the rounded numbers.",
            ),
        )
        yield found_in(seen, said, dtype=what.dtype, op=what.op, source=what.source)


def _exact(dtype: str) -> int:
    """The largest whole number up to which a format has all of them."""
    return 256 if dtype == "bfloat16" else 2048
