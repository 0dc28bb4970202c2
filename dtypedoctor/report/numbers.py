"""Numbers as a reader wants them: short, with units, and a dash where there is none."""

import math
from collections.abc import Sequence

__all__ = ["ABSENT", "count", "counted", "duration", "memory", "number", "ratio", "series", "span"]

ABSENT = "–"
"""Stands for a number that is missing or not finite."""


def number(value: float | None) -> str:
    """Four significant digits; all of them where the whole number before the point is longer (65504)."""
    if value is None or not math.isfinite(value):
        return ABSENT
    return f"{value:.0f}" if 10_000 <= abs(value) < 1_000_000 else f"{value:.4g}"


def count(value: int | None) -> str:
    """A whole number with thousands separated."""
    return ABSENT if value is None else f"{value:,}"


def counted(amount: int, one: str, several: str = "") -> str:
    """A number of things: ``1 step``, ``1,024 steps``; ``several`` where the plural is not made by an s."""
    return f"{amount:,} {one if amount == 1 else several or one + 's'}"


def duration(seconds: float | None) -> str:
    """Seconds, or milliseconds below one second."""
    if seconds is None:
        return ABSENT
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def memory(size: int | None) -> str:
    """Bytes in the binary unit that leaves one to four digits."""
    if size is None:
        return ABSENT
    value = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"


def ratio(value: float | None) -> str:
    """A factor, e.g. ``1.05×``."""
    return ABSENT if value is None else f"{value:.3g}×"


def span(values: Sequence[float | None]) -> str:
    """The first and the last of a series, e.g. ``2.772 → 2.41``."""
    if not values:
        return ABSENT
    return " → ".join(_short(value) for value in (values[:1] if len(values) == 1 else (values[0], values[-1])))


def series(values: Sequence[float | None], limit: int = 12) -> str:
    """The values one after the other; beyond ``limit`` of them the middle is left out."""
    if len(values) <= limit:
        return " ".join(map(number, values)) or ABSENT
    head, tail = values[: limit - limit // 3], values[-(limit // 3) :]
    return f"{' '.join(map(number, head))} … {' '.join(map(number, tail))} ({len(values)} steps)"


def _short(value: float | None) -> str:
    return ABSENT if value is None or not math.isfinite(value) else f"{value:.3g}"
