"""``rounded-rotary-buffer``: frequencies or positions that half precision has rounded."""

from collections.abc import Iterator
from dataclasses import replace

from dtypedoctor.diagnosis.finding import Finding, Severity
from dtypedoctor.diagnosis.observations import observed
from dtypedoctor.diagnosis.statement import Statement, found_in
from dtypedoctor.diagnosis.wording import short
from dtypedoctor.trace.reader import Trace

ID = "rounded-rotary-buffer"


def detect_rotary_tables(trace: Trace) -> Iterator[Finding]:
    """Rotary frequencies that equal their own rounding."""
    for seen in observed(trace, "rotary-table"):
        values = seen.values
        restored = values["dtype"] != values["rounded_to"]
        was = f"has the dtype {values['dtype']} again and still" if restored else f"is {values['dtype']}, so it"
        said = Statement(
            id=ID,
            severity=Severity.WARNING,
            proven_by=(
                f"a table computed in float32 differs from the one that is read by up to {100 * values['deviation']:.2g}%"
                if values["read"]
                else None
            ),
            summary=(
                f"The frequencies {short(values['name'])} are rounded to {values['rounded_to']}: at position "
                f"{values.get('position', 4096)} an angle is off by {values['angle_error']:.2g} rad."
            ),
            cause=(
                f"{values['name']} {was} holds {values['rounded_to']} values. Casting a whole model casts its buffers too. The error "
                "of a frequency is multiplied by the position; casting back does not bring the bits back."
            ),
            evidence=(
                (
                    f"{values['length']} values from {values['first']:.6g} to {values['last']:.6g}, all equal to their own "
                    f"rounding to {values['rounded_to']}."
                ),
                (
                    f"They are up to {100 * values['deviation']:.2g} % off the geometric progression through the first and the "
                    "last, which a table in float32 follows."
                ),
            ),
        )
        yield replace(found_in(seen, said, dtype=values["dtype"]), phase="static", step=None)


def detect_rounded_positions(trace: Trace) -> Iterator[Finding]:
    """Positions of which half precision has made fewer."""
    for seen in observed(trace, "rounded-positions"):
        values = seen.values
        said = Statement(
            id=ID,
            severity=Severity.WARNING,
            proven_by=f"the same positions in float32 are up to {values['largest_error']:g} apart from those that are used",
            summary=(
                f"{short(values['fqn'])} counts positions in {values['dtype']}: of {values['length']} only "
                f"{values['distinct']} are left."
            ),
            cause=(
                f"{values['dtype']} does not have every whole number above {_exact(values['dtype'])}, so neighbouring tokens of a "
                "longer text share a position. Count in int64 or float32, and cast what is computed from the positions."
            ),
            evidence=(
                f"{values['op']} at {values['source']} rounds them by up to {values['largest_error']:g}.",
                f"{values['used_by']} at {values['used_at']} computes with the rounded numbers.",
            ),
        )
        yield found_in(seen, said, dtype=values["dtype"], op=values["op"], source=values["source"])


def _exact(dtype: str) -> int:
    """The largest whole number up to which a format has all of them."""
    return 256 if dtype == "bfloat16" else 2048
