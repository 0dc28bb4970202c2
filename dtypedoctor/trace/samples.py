"""Reads lines of samples, thousands at a time: a long trace is little else."""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import repeat
from typing import Any

from dtypedoctor.trace.events import Sample

__all__ = ["BATCH", "SAMPLES_PREFIX", "parse_line", "parse_lines"]

SAMPLES_PREFIX = b'["s",'
"""How every line of samples begins."""

BATCH = 4096
"""Lines that are worth parsing together; more only take more memory."""

_TYPES = (int, int, int, int, float, int, int)
_SETTERS = tuple(Sample.__dict__[f.name].__set__ for f in fields(Sample))


def parse_lines(lines: Sequence[bytes]) -> list[Sample]:
    """The samples of many lines, in file order.

    Raises:
        ValueError: at least one line is damaged; :func:`parse_line` tells which.
    """
    values = json.loads(b"[" + b",".join(lines) + b"]")
    if len(values) != len(lines):  # two damaged lines may complete each other
        raise ValueError("a line is damaged")
    columns: tuple[list[Any], ...] = ([], [], [], [], [], [], [])
    numbers, steps, calls, sites, magnitudes, nans, infs = columns
    for _, n, step, call, rows in values:
        for number, row in enumerate(rows, start=n):
            numbers.append(number)
            steps.append(step)
            calls.append(call)
            sites.append(row[0])
            magnitudes.append(row[1])
            nan, inf = row[2:] or (0, 0)
            nans.append(nan)
            infs.append(inf)
    if any(not set(map(type, column)) <= {kind} for column, kind in zip(columns, _TYPES, strict=True)):
        raise ValueError("a number has the wrong type")
    return _assemble(columns)


def parse_line(value: list[Any]) -> Iterator[Sample]:
    """The samples of one decoded line.

    Raises:
        ValueError, TypeError, IndexError: the line is damaged.
    """
    tag, n, step, call, rows = value
    if tag != "s":
        raise ValueError(tag)
    for i, row in enumerate(rows):
        nan, inf = (row[2], row[3]) if len(row) > 2 else (0, 0)
        yield Sample(n=int(n) + i, step=int(step), call=int(call), site=int(row[0]), absmax=float(row[1]),
                     num_nan=int(nan), num_inf=int(inf))  # fmt: skip


def _assemble(columns: Sequence[list[Any]]) -> list[Sample]:
    # The constructor of a frozen dataclass takes a microsecond a field; filling the slots column by column takes a tenth.
    samples = list(map(Sample.__new__, repeat(Sample, len(columns[0]))))
    for setter, column in zip(_SETTERS, columns, strict=True):
        deque(map(setter, samples, column), maxlen=0)
    return samples
