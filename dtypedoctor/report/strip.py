"""The dtype-and-magnitude strip of the modules around the origin, as lines that every format lays out."""

from collections.abc import Sequence
from dataclasses import dataclass

from dtypedoctor.dtypes import short_name
from dtypedoctor.report.model import StripRow
from dtypedoctor.report.numbers import ABSENT, count, number
from dtypedoctor.report.scale import fill, limit

__all__ = ["StripLine", "scale_caption", "shared_prefix", "strip_lines", "strip_title"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StripLine:
    """One module of the strip in words.

    Attributes:
        name: dotted name without the dots and names that all lines share.
        fill: place of absmax between the dtype's smallest (0.0) and largest (1.0) value, None without such a scale.
        note: what is wrong here, or where the origin is; empty for an ordinary module.
    """

    name: str
    dtype: str
    absmax: str
    fill: float | None
    note: str
    is_origin: bool

    def bar(self, width: int) -> str:
        """A bar of ``width`` characters, filled up to absmax."""
        full = round((self.fill or 0.0) * width)
        return "█" * full + "░" * (width - full)


def strip_lines(rows: Sequence[StripRow]) -> list[StripLine]:
    """The strip in words, in the order of ``rows``."""
    shared = shared_prefix([row.fqn for row in rows])
    return [
        StripLine(
            name=("…" if shared else "") + row.fqn[shared:] if row.fqn else row.cls or "(model)",
            dtype=short_name(row.dtype),
            absmax=number(row.absmax),
            fill=_fill(row),
            note=_note(row),
            is_origin=row.is_origin,
        )
        for row in rows
    ]


def scale_caption(rows: Sequence[StripRow]) -> str:
    """What the bars mean, with the largest value of each dtype that occurs."""
    limits = {short_name(row.dtype): number(limit(row.dtype)) for row in rows if limit(row.dtype) is not None}
    ends = ", ".join(f"{dtype} {largest}" for dtype, largest in limits.items())
    return f"The bar is logarithmic, from the dtype's smallest normal value to its largest ({ends or ABSENT})."


def strip_title(rows: Sequence[StripRow]) -> str:
    """What the strip is about: the origin only where one is known."""
    return (
        "Magnitudes around the origin" if any(row.is_origin for row in rows) else "Magnitudes near the first inf or NaN"
    )


def shared_prefix(names: list[str]) -> int:
    """Length of the leading dotted parts that all ``names`` share, the last part of each always kept."""
    if len(names) < 2:
        return 0
    parts = [name.split(".") for name in names]
    shared: list[str] = []
    for column in zip(*(p[:-1] for p in parts), strict=False):
        if len(set(column)) > 1:
            break
        shared.append(column[0])
    if shared and any(p[len(shared)].isdigit() for p in parts):
        shared.pop()  # "layers.0" says more than "0"
    return sum(len(part) + 1 for part in shared)


def _fill(row: StripRow) -> float | None:
    return 1.0 if row.num_inf and row.absmax is not None else fill(row.absmax, row.dtype)


def _note(row: StripRow) -> str:
    notes = ["ORIGIN"] if row.is_origin else []
    if row.num_inf:
        notes.append(f"{count(row.num_inf)} inf")
    if row.num_nan:
        notes.append(f"{count(row.num_nan)} NaN")
    return ", ".join(notes) or ("" if row.absmax is not None else ABSENT)
