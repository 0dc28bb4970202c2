"""Writes a trace: one line per record, each handed to the kernel as a whole, so that nothing but a power cut loses it."""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass, replace
from math import isfinite
from pathlib import Path
from typing import Any

from dtypedoctor.interruptions import contained, is_interruption, say
from dtypedoctor.redaction.redact import without_process_secrets
from dtypedoctor.redaction.secrets import recent_literals
from dtypedoctor.trace.events import (
    NAMES,
    End,
    Flow,
    Header,
    Metric,
    Observation,
    Observed,
    Op,
    ParameterNote,
    ProbeLogProbs,
    Replay,
    Root,
    ScalerState,
    Site,
)
from dtypedoctor.trace.lines import CURSOR, CURSOR_FORMAT, CURSOR_MAGIC, EVENTS, CursorPage, Lines
from dtypedoctor.trace.reader import DetailFiles, Loader
from dtypedoctor.trace.records import to_disk
from dtypedoctor.unpatched import getpid, to_json

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Trouble of a disk, as against a wrong place."""

SampleRow = tuple[int, float, int, int]
"""site id, absmax over finite elements, number of NaN, number of inf."""

_OF_NAMES = frozenset({Header, Root, ParameterNote, Site, Flow, Op, ScalerState})
"""Records that are made of names of modules, operators and dtypes. There are many, and no shape of a token is looked for in them."""

_HELD = (Op, Replay)
MAX_HELD = 20_000
"""Records that are held back while a call is made again, and how many of them."""
_OF_A_STEP = (Metric, ScalerState, ProbeLogProbs)
"""Records that every step leaves; like samples they are folded in a long run."""


def encode(record: Any) -> dict[str, Any]:
    """The JSON object of a record; empty fields (None, False, an empty list or text) are left out where a reader puts the same back."""
    if isinstance(record, Observed):
        record = to_disk(record)
    return {"e": NAMES[type(record)], **_plain(record)}


def _public(value: dict[str, Any], kind: type[Any]) -> str:
    """Write a record as JSON without what is secret in this process, and in messages without what looks so either.

    Names of modules and operators are thousands: their line is searched as a whole, and looked at text by text only if it holds a secret.
    """
    if kind not in _OF_NAMES:
        return to_json(without_process_secrets(value, recent=kind in (Observation, Observed)))
    for key in ("error", "scalars"):
        if key in value:
            value[key] = without_process_secrets(value[key], recent=True)
    line = to_json(value)
    return to_json(without_process_secrets(value, recent=True)) if recent_literals().are_in(line) else line


_NUMBERS = (int, float)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        plain = {}
        for field in fields(value):
            held = getattr(value, field.name)
            if type(held) in _NUMBERS:  # most, in the records of each step
                plain[field.name] = held
            elif not _omitted(held, field.default):
                plain[field.name] = _plain(held)
        return plain
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _omitted(value: Any, default: Any) -> bool:
    empty = value is None or value is False or value == [] or value == ""
    return empty and (default is MISSING or default == value)


class TraceWriter:
    """Appends records to ``DIRECTORY/events.jsonl``, and in a long run to the files beside it (:mod:`dtypedoctor.trace.reader`).

    The files are opened without a buffer and each record is written by one system call, so a process that is killed at
    any moment leaves whole records and at most one torn line at the end.

    Trouble with the disk never reaches the caller: the first record that cannot be written ends the recording, which is said
    on standard error and in the cursor's page; what comes later is counted there.

    Args:
        directory: an existing, writable directory.

    Raises:
        FileExistsError: the directory already holds a trace; a trace is never overwritten.
        OSError: the directory is not there or not writable. That it is full is no error: nothing is recorded then.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory = directory.absolute()  # the program may change its working directory
        self._nonfinite: set[int] = set()
        self.following = 0
        """The next sequence number. Who reserves one for each of many samples counts it up itself, because a call takes longer."""
        self._held: list[Any] | None = None
        self._entered = 0
        self._disowned = False
        self._marks = True
        self._owner = getpid()
        self._stopped = 0
        self._lost = 0
        self._cursor = CursorPage.memory_only()
        try:
            self._events = Lines(directory / EVENTS)
            self._cursor = CursorPage(directory / CURSOR)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._events = Lines(None)
            self._stop(error)
        self._details = DetailFiles(directory, self._events, _read_details)

    def next_n(self, count: int = 1) -> int:
        """Reserves ``count`` sequence numbers and returns the first."""
        first = self.following
        self.following = first + count
        return first

    @contextmanager
    def numbering_from(self, first: int) -> Iterator[None]:
        """Inside, :meth:`next_n` returns numbers from ``first`` on, which :meth:`next_n` has reserved before; afterwards it goes on as it would have.

        Operators, at most :data:`MAX_HELD`, are written at the end, but for those that :meth:`forget_held` has forgotten; none where an exception leaves it.
        """
        following, self.following = self.following, first
        self._held = []
        is_over = False
        try:
            yield
            is_over = True
        finally:
            self.following = following
            held, self._held = self._held if is_over else [], None
            for record in held:
                self.write(record)

    def forget_held(self) -> None:
        """Forgets the operators that are held back: a call that is not made to its end shows nothing."""
        if self._held is not None:
            self._held = []

    def write(self, record: Any) -> None:
        """Appends one record.

        Raises:
            ValueError: the record holds NaN or inf, which JSON cannot.
        """
        if self._held is not None and len(self._held) < MAX_HELD and isinstance(record, _HELD):
            self._held.append(record)
            return
        if isinstance(record, _OF_A_STEP):
            if self._details.number and (getattr(record, "skipped", False) or getattr(record, "nonfinite", ())):
                self._details.event()
            self._line(encode(record), (record.step, 0))
        elif isinstance(record, End):
            self._line(encode(replace(record, details=self._details.number)))
        else:
            self._append([_public(encode(record), type(record))], None)

    def write_samples(self, n: int, step: int, call: int, rows: Sequence[SampleRow]) -> None:
        """Appends one line of samples; row i has the sequence number ``n + i`` (reserve them with :meth:`next_n`).

        Raises:
            ValueError: a magnitude is NaN or inf.
        """
        self.write_runs(step, call, [(n, rows)])

    def write_finite(self, n: int, step: int, call: int, site: int, absmax: float) -> None:
        """Appends one sample that is finite throughout, as :meth:`write_samples` does.

        Raises:
            ValueError: the magnitude is NaN or inf.
        """
        self._append([f'["s",{n},{step},{call},[{_compact(((site, absmax, 0, 0),))}]]'], (step, call))

    def write_metric(self, n: int, step: int, values: Mapping[str, float]) -> None:
        """Appends the :class:`Metric` of a step whose numbers are all finite, as :meth:`write` does, in a tenth of the time.

        Raises:
            ValueError: a number is NaN or inf.
        """
        if not all(map(isfinite, values.values())):
            raise ValueError(f"not finite: {values}")
        numbers = ",".join([f'"{name}":{float(value)!r}' for name, value in values.items()])
        self._append([f'{{"e":"metric","n":{n},"step":{step},"values":{{{numbers}}}}}'], (step, 0))

    def write_runs(self, step: int, call: int, runs: Sequence[tuple[int, Sequence[SampleRow]]]) -> None:
        """Appends a line of samples for each of several runs of sequence numbers, all of them by one system call.

        Args:
            step, call: of all of them.
            runs: the first number of each, and its rows.

        Raises:
            ValueError: a magnitude is NaN or inf.
        """
        moment = f"{step},{call}"
        lines = [f'["s",{n},{moment},[{_compact(rows)}]]' for n, rows in runs]
        self._append(lines, (step, call))
        if self._details.number:
            # The first time that a place is not finite is worth keeping in detail
            bad = {site for _, rows in runs for site, _, nan, inf in rows if nan or inf} - self._nonfinite
            if bad:
                self._nonfinite |= bad
                self._details.event()

    def write_beside(self, name: str, data: bytes) -> None:
        """Writes a file of data beside the trace, which only its owner can read. Does nothing where it is there, or cannot be written."""
        if not self._is_ours():
            return
        with contained():
            descriptor = os.open(self.directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)

    def mark(self, step: int, call: int, site: int) -> None:
        """Notes, in memory shared with the file system, the module that is being entered (no system call).

        It does not ask whether this is still the same process: see :meth:`begin_call`.
        """
        if self._marks:
            CURSOR_FORMAT.pack_into(self._cursor.page, 0, self.following, step, call, site, CURSOR_MAGIC)

    def begin_call(self) -> None:
        """An outermost module call begins: no mark is left in a child that a C library has forked."""
        self._marks = self._is_ours()

    def called_collective(self, called: tuple[int, int] | None, *, is_shared: bool) -> None:
        """Notes a collective that is being entered, in the same memory.

        Args:
            called: number of a channel, and how many collectives were called on it.
            is_shared: every rank sends something to it: these are counted, too.
        """
        self._entered += is_shared
        if self._is_ours():
            if called is not None:
                self._cursor.called(*called)
            if is_shared:
                self._cursor.entered(self._entered)

    def disown(self) -> None:
        """Writes nothing more. For a forked child, whose parent goes on writing the same file."""
        self._disowned = True
        self._marks = False

    def close(self) -> None:
        """Closes the files; the End record has to be written before."""
        if self._is_ours():
            self._details.complete()
        self._details.close()
        self._events.close()
        self._cursor.close()
        self._disowned = True
        self._marks = False

    def _is_ours(self) -> bool:
        """False in a forked child, also in one that a C library has forked behind Python's back."""
        return not self._disowned and getpid() == self._owner

    def _line(self, value: Any, moment: tuple[int, int] | None = None) -> None:
        self._append([to_json(value)], moment)

    def _append(self, texts: Sequence[str], moment: tuple[int, int] | None) -> None:
        if not self._is_ours():
            return
        if self._stopped:
            self._lost += len(texts)
            self._cursor.stopped(self._stopped, self._lost)
            return
        lines = list(map(str.encode, texts))  # in ASCII
        try:
            if moment is None:
                self._events.append(*lines)
            else:
                self._details.at(*moment)
                self._details.current.append(*lines)
        except OSError as error:  # TimeoutError is one, and what many signal handlers raise
            if is_interruption(error):
                raise
            self._stop(error, len(lines))

    def _stop(self, error: OSError, lost: int = 1) -> None:
        self._stopped = error.errno or 5
        self._lost = lost
        self._cursor.stopped(self._stopped, self._lost)
        if self._stopped in _FULL:  # else the file has been taken away; the cursor's page tells the reader
            say(f"dtypedoctor: recording stopped ({error.strerror}: {self.directory}); your program continues")


def _compact(rows: Sequence[SampleRow]) -> str:
    """Rows in JSON, magnitudes with a fraction or an exponent and seven digits. A tenth of the time of ``json``.

    Raises:
        ValueError: a magnitude is NaN or inf.
    """
    found = []
    for site, absmax, nan, inf in rows:
        decimal = f"{absmax:.7g}"
        if decimal.isdigit():
            decimal += ".0"
        elif not isfinite(absmax):
            raise ValueError(f"not a magnitude: {absmax}")
        found.append(f"[{site},{decimal},{nan},{inf}]" if nan or inf else f"[{site},{decimal}]")
    return ",".join(found)


def _read_details(path: Path) -> tuple[list[Any], list[Any]]:
    loader = Loader()
    loader.file(path.read_bytes())
    return loader.samples, loader.records
