"""Reads lines of samples, thousands at a time: a long trace is little else."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import repeat
from typing import Any

from dtypedoctor.trace.decode import LARGEST
from dtypedoctor.trace.events import Sample
from dtypedoctor.unpatched import from_json

__all__ = ["BATCH", "SAMPLES_PREFIX", "parse_line", "parse_lines"]

SAMPLES_PREFIX = b'["s",'
"""How every line of samples begins."""

BATCH = 4096
"""Lines that are worth parsing together; more only take more memory."""

_MAGNITUDE = 4
_TYPES = (int, int, int, int, float, int, int)
_SETTERS = tuple(Sample.__dict__[f.name].__set__ for f in fields(Sample))


def parse_lines(lines: Sequence[bytes]) -> list[Sample]:
    """The samples of many lines, in file order.

    Raises:
        ValueError: at least one line is damaged; :func:`parse_line` tells which.
    """
    values = from_json(b"[" + b",".join(lines) + b"]")
    if len(values) != len(lines):  # two damaged lines may complete each other
        raise ValueError("a line is damaged")
    rows = [row for value in values for row in value[4]]
    widths = set(map(len, rows))
    if not widths <= {2, 4}:
        raise ValueError("a row has the wrong length")
    rare = 4 in widths  # counts of NaN and inf are written only where there are any
    columns: tuple[list[Any], ...] = (
        [number for _, first, _, _, own in values for number in range(first, first + len(own))],
        [step for _, _, step, _, own in values for _ in own],
        [call for _, _, _, call, own in values for _ in own],
        [row[0] for row in rows],
        [row[1] for row in rows],
        [row[2] if len(row) == 4 else 0 for row in rows] if rare else [0] * len(rows),
        [row[3] if len(row) == 4 else 0 for row in rows] if rare else [0] * len(rows),
    )
    _check(columns if rare else columns[: _MAGNITUDE + 1])
    return _assemble(columns)


def _check(columns: Sequence[list[Any]]) -> None:
    """Refuses numbers that no writer writes; each column is looked at as a whole, which takes a tenth of the time."""
    for index, (column, kind) in enumerate(zip(columns, _TYPES, strict=False)):
        if not set(map(type, column)) <= {kind}:
            raise ValueError("a number has the wrong type")
        if not column:
            continue
        if index == _MAGNITUDE:
            if not 0.0 <= min(column) <= max(column) < math.inf:
                raise ValueError("a magnitude is none")
        elif not -LARGEST < min(column) <= max(column) < LARGEST:
            raise ValueError("a number is too large")


def parse_line(value: list[Any]) -> Iterator[Sample]:
    """The samples of one decoded line.

    Raises:
        ValueError, TypeError, IndexError: the line is damaged.
    """
    tag, n, step, call, rows = value
    if tag != "s":
        raise ValueError(tag)
    for i, row in enumerate(rows):
        nan, inf = row[2:] or (0, 0)
        whole = (n + i, step, call, row[0], nan, inf)
        if any(type(number) is not int or not -LARGEST < number < LARGEST for number in whole):
            raise ValueError("a number has the wrong type, or is too large")
        if type(row[1]) not in (int, float) or not 0.0 <= row[1] < math.inf:
            raise ValueError("a magnitude is none")
        yield Sample(n=n + i, step=step, call=call, site=row[0], absmax=float(row[1]), num_nan=nan, num_inf=inf)


def _assemble(columns: Sequence[list[Any]]) -> list[Sample]:
    # The constructor of a frozen dataclass takes a microsecond a field; filling the slots column by column takes a tenth.
    samples = list(map(Sample.__new__, repeat(Sample, len(columns[0]))))
    for setter, column in zip(_SETTERS, columns, strict=True):
        deque(map(setter, samples, column), maxlen=0)
    return samples
