"""Reads a trace back, whole or torn, and follows one that is still being written.

Of a long run the details of its steps lie in numbered files, of which some are folded into totals. Modules are renamed where a model was put
inside a larger one on the way, so that each has one name in a whole trace.
"""

import contextlib
import gc
import math
import os
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import read_head, reason
from dtypedoctor.trace.events import (
    KINDS,
    SCHEMA,
    End,
    Flow,
    Header,
    Metric,
    Observation,
    Op,
    ParameterNote,
    Root,
    Sample,
    ScalerState,
    Site,
    TensorNote,
)
from dtypedoctor.trace.lines import (
    CURSOR,
    EVENTS,
    PAGE,
    Lines,
    open_lines,
    read_called,
    read_entered,
    read_mark,
    read_stopped,
    seal,
    unreadable,
)
from dtypedoctor.trace.model import Cursor, Folded, Moment, Total, Trace
from dtypedoctor.trace.records import LARGEST, decode, from_disk
from dtypedoctor.unpatched import from_json, to_json

LARGEST_MAIN = 256 << 20
"""Bytes of the main file that are read; a writer begins another file after a sixteenth of it, unless a single step fills more."""
LARGEST_DETAILS = 64 << 20
MOST_DETAILS = 256
"""Bytes of a file of details, and files that are read. A writer keeps about thirty, of a megabyte each."""


def samples_of(value: list[Any]) -> Iterator[Sample]:
    """The samples of one decoded line.

    Raises:
        ValueError, TypeError: the line is damaged.
    """
    tag, n, step, call, rows = value
    if tag != "s":
        raise ValueError(tag)
    for number, row in enumerate(rows, n):
        site, absmax, nan, inf = row if len(row) == 4 else (*row, 0, 0)  # counts are written only where there are any
        for whole in (number, step, call, site, nan, inf):
            if type(whole) is not int or not 0 <= whole < LARGEST:
                raise ValueError("a number has the wrong type, or is too large")
        if type(absmax) not in (int, float) or not 0.0 <= absmax < math.inf:
            raise ValueError("a magnitude is none")
        yield Sample(n=number, step=step, call=call, site=site, absmax=float(absmax), num_nan=nan, num_inf=inf)


DAMAGED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError)
"""What decoding a damaged line may raise."""


class Loader:
    """Collects the records of one file after another.

    Attributes:
        records: every whole record that is not a sample, in the order in which it was written.
        samples: every measured tensor, in the same order.
        sites: places by id.
    """

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.samples: list[Sample] = []
        self.sites: dict[int, Site] = {}
        self._bad: list[int] = []
        self._unknown: dict[str, int] = {}

    def file(self, data: bytes, lines: int | None = None) -> list[str]:
        """Reads a file; returns a sentence for each part of it that could not be read.

        Args:
            data: what is in it.
            lines: how many lines it has at least, where that is known.

        Raises:
            UsageError: it was written by a newer version of the format.
        """
        with without_collector():  # nothing here is garbage, and looking for it takes a third of the time
            opened = open_lines(data, lines or 0)
            for number, line in opened.lines:
                try:
                    value = from_json(line)
                    if isinstance(value, list):
                        self.samples += list(samples_of(value))  # all of a line, or nothing
                    else:
                        self._object(value)
                except DAMAGED:
                    self._bad.append(number)
        bad, unknown = self._bad, self._unknown
        self._bad, self._unknown = [], {}
        strangers = (f"{count} record(s) of unknown kind {name[:40]!r}" for name, count in unknown.items())
        return [*opened.damage(), *unreadable(bad), *strangers]

    def _object(self, value: dict[str, Any]) -> None:
        name = value.pop("e")
        kind = KINDS.get(name)
        if kind is None:
            self._unknown[str(name)] = self._unknown.get(str(name), 0) + 1
            return
        schema = value.get("schema") if kind is Header else None
        if type(schema) is int and schema > SCHEMA:
            shown = str(schema) if schema < 10**6 else "of many digits"
            raise UsageError(f"this trace has schema {shown}, newer than {SCHEMA}", "Update dtypedoctor to read it.")
        record = decode(kind, value)
        if kind is Site:
            self.sites[record.id] = record
        self.records.append(from_disk(record) if kind is Observation else record)


@contextmanager
def without_collector() -> Iterator[None]:
    """No garbage collection inside."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_trace(directory: Path) -> Trace:
    """Reads every whole record of the trace in ``directory``.

    A torn last line is normal after a kill and not reported as damage. Lines in the middle that cannot be read, records
    of unknown kind, missing fields, and samples of places whose description is lost are counted in ``damage`` and skipped.
    Of a step that was folded in part, the other part is left out too: a step is there as a whole or in the totals only.

    Raises:
        UsageError: there is no trace, or it was written by a newer version of the format.
    """
    loader = Loader()
    data = _bytes(directory, EVENTS)
    damage = loader.file(data)
    if len(data) == LARGEST_MAIN:
        damage.append(f"only the first {LARGEST_MAIN >> 20} MiB of {EVENTS} were read")
    page = _bytes_or_nothing(directory / CURSOR)[:PAGE]
    folded = _read_details(directory, loader, damage)
    names = CanonicalNames([record for record in loader.records if isinstance(record, Root)])
    records = tuple(map(names.of, loader.records)) if names else tuple(loader.records)
    sites = {number: names.of(site) for number, site in loader.sites.items()} if names else loader.sites
    mark, cursor = read_mark(page), None
    if mark is not None:
        cursor = Cursor(n=mark.n, step=mark.step, call=mark.call, site=sites.get(mark.site))
    samples = loader.samples
    if folded is not None and folded.spans:
        samples = [sample for sample in samples if not folded.holds((sample.step, sample.call))]
    samples.sort(key=attrgetter("n"))
    return Trace(
        records=records,
        samples=tuple(_described(samples, sites, damage)),
        sites=sites,
        damage=(*damage, *_recording_stopped(page)),
        stopped=read_stopped(page),
        cursor=cursor,
        collectives=read_entered(page),
        called=read_called(page),
        folded=folded,
    )


def _bytes(directory: Path, name: str) -> bytes:
    try:
        return read_head(directory / name, LARGEST_MAIN)
    except OSError as error:
        raise UsageError(
            f"{directory}: no trace here ({reason(error)})", "Give a directory that a run has left."
        ) from error


def _bytes_or_nothing(path: Path) -> bytes:
    try:
        return read_head(path, LARGEST_DETAILS)
    except OSError:  # a missing cursor only means that no module was entered, missing totals that nothing was folded
        return b""


def _lost(known: set[int], loader: Loader) -> int:
    """How many files of details are missing. Counted, not listed: a number from a stranger sizes nothing."""
    there = {number for number in known if number > 0}
    ends = [record.details for record in loader.records if isinstance(record, End)]
    return max((*there, *ends), default=0) - len(there)


def _read_details(directory: Path, loader: Loader, damage: list[str]) -> Folded | None:
    """Reads the files of a long run; what they lack is added to ``damage``."""
    folded = _read_folded(_bytes_or_nothing(directory / FOLDED), damage)
    done = set(folded.segments) if folded is not None else set()
    found = detail_files(directory)
    for number, (path, lines) in sorted(found.items())[-MOST_DETAILS:]:
        if number not in done:  # else the process was killed before it could remove the file
            damage += (f"{path.name}: {sentence}" for sentence in loader.file(_bytes_or_nothing(path), lines))
    lost = _lost({*found, *done}, loader)
    if lost > 0:
        damage.append(f"{lost:,} file(s) of details are missing")
    if len(found) > MOST_DETAILS:
        damage.append(f"only the last {MOST_DETAILS:,} of {len(found):,} files of details were read")
    return folded


def _read_folded(data: bytes, damage: list[str]) -> Folded | None:
    if not data:
        return None
    opened = open_lines(data)
    try:
        if opened.sealed and opened.lines:
            return folded_from_json(opened.lines[0][1])
    except DAMAGED:
        pass
    damage.append(f"the totals of folded steps cannot be read ({FOLDED})")
    return None


def _described(samples: list[Sample], sites: dict[int, Site], damage: list[str]) -> list[Sample]:
    """The samples whose place is known."""
    used = {sample.site for sample in samples}
    unknown = used - sites.keys()
    if not unknown:
        return samples
    kept = [sample for sample in samples if sample.site not in unknown]
    damage.append(f"{len(samples) - len(kept)} measurement(s) of {len(unknown)} place(s) that are described nowhere")
    return kept


def _recording_stopped(page: bytes) -> Iterator[str]:
    stopped = read_stopped(page)
    if stopped is not None:
        yield f"recording stopped before the program ended: {os.strerror(stopped.errno)}; {stopped.lost} record(s) were not written"


_OF_A_ROOT = (Flow, ParameterNote, Site, Op)
_OWNED = frozenset({"parameter", "buffer", "attribute"})
"""Origins of tensors that are named as something a module holds."""


class CanonicalNames:
    """Names from the largest root on.

    Args:
        roots: the trace's roots, in the order in which they were seen.
    """

    def __init__(self, roots: list[Root]) -> None:
        self._place: dict[int, tuple[int, str]] = {}
        for root in reversed(roots):  # a larger root comes after those that it absorbs
            number, prefix = self._place.get(root.root, (root.root, ""))
            for inner, name in root.absorbs.items():
                self._place[int(inner)] = (number, _join(prefix, name))

    def __bool__(self) -> bool:
        """Whether there is anything to rename."""
        return bool(self._place)

    def of(self, record: Any) -> Any:
        """The record with the names of the largest root; records that do not tell their root are returned as they are."""
        if not isinstance(record, _OF_A_ROOT) or record.root not in self._place:
            return record
        root, prefix = self._place[record.root]
        if isinstance(record, ParameterNote):
            return replace(record, root=root, name=_join(prefix, record.name))
        if isinstance(record, Op):
            return replace(
                record,
                root=root,
                fqn=_join(prefix, record.fqn),
                inputs=[_renamed(note, prefix) for note in record.inputs],
                outputs=[_renamed(note, prefix) for note in record.outputs],
            )
        if isinstance(record, Site) and record.kind in ("grad", "param", "loss"):
            return record  # named by the optimizer's parameters or by nobody, never from a root
        return replace(record, root=root, fqn=_join(prefix, record.fqn))


def _renamed(note: TensorNote, prefix: str) -> TensorNote:
    return replace(note, name=_join(prefix, note.name)) if note.name and note.origin in _OWNED else note


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def steps_by_call(trace: Trace) -> Trace:
    """The trace with the number of the outermost call as the step, if no optimizer step was done in it; else unchanged.

    A script that only evaluates or generates, or that fails before its first optimizer step, would otherwise be in step 1
    from beginning to end.
    """
    if (
        (trace.end is not None and trace.end.steps_completed > 0)
        or any(site.kind == "param" for site in trace.sites.values())
        or bool(trace.all(ScalerState))
    ):
        return trace
    return replace(
        trace,
        records=tuple(_renumbered(record) for record in trace.records),
        samples=tuple(replace(sample, step=max(sample.call, 1)) for sample in trace.samples),
        by_call=True,
        cursor=replace(trace.cursor, step=max(trace.cursor.call, 1)) if trace.cursor is not None else None,
    )


def _renumbered(record: Any) -> Any:
    if hasattr(record, "step") and hasattr(record, "call"):
        return replace(record, step=max(record.call, 1))
    return record


FOLDED = "folded.json"

_NAME = re.compile(r"detail-([0-9]{1,9})(?:\.([0-9]{1,9}))?\.jsonl")


class Sizes:
    """How much is kept of a long run. Class attributes, so that a test can work with small ones.

    Attributes:
        head: bytes of the main file after which the first other file is begun.
        file: bytes after which the next one is begun.
        last: files that are always kept behind the one that is being written.
        around_events: files that are kept because something happened in them or in one next to them.
    """

    head = 16 << 20
    file = 1 << 20
    last = 4
    around_events = 8


_LONG_STEP = 4
"""A step that is this many files long is divided between two calls of modules."""

ReadDetails = Callable[[Path], tuple[Any, Any]]
"""Samples and records of a file."""


def detail_files(directory: Path) -> dict[int, tuple[Path, int | None]]:
    """The files of details in ``directory`` by number, each with the lines that it must have, None where nobody has said."""
    named = ((path, _NAME.fullmatch(path.name)) for path in sorted(directory.iterdir()))
    return {int(name[1]): (path, int(name[2]) if name[2] else None) for path, name in named if name is not None}


class DetailFiles:
    """Says which file a step's records go to.

    Args:
        directory: where the files lie.
        main: the main file.
        read: reads a file back that is to be folded.
    """

    def __init__(self, directory: Path, main: Lines, read: ReadDetails) -> None:
        self.current = main
        """Where to write now."""
        self.number = 0
        """Number of the current file, 0 for the main one."""
        self._directory = directory
        self._read = read
        self._newest: Moment = (0, 0)
        self._limit: float = Sizes.head
        self._eventful: set[int] = set()
        self._path = Path()
        self._closed: deque[tuple[int, Path, Lines]] = deque()
        self._kept = 0
        self._folded = Folded()
        self._lock = threading.RLock()  # a signal handler may come here again

    def at(self, step: int, call: int) -> None:
        """Something of this step and outermost call is about to be written.

        Raises:
            OSError: a file cannot be written.
        """
        if (step, call) <= self._newest:
            return
        size = self.current.size
        if size > self._limit and (step > self._newest[0] or size > _LONG_STEP * self._limit):
            with self._lock:
                if self.current.size > self._limit:
                    self._rotate()
        self._newest = (step, call)

    def event(self) -> None:
        """Something worth keeping has happened in the current file."""
        self._eventful.add(self.number)

    def complete(self) -> None:
        """Nothing more will be written. Trouble with the disk is passed over: the name of one file will not say its lines."""
        with contextlib.suppress(OSError):
            if self.number:
                _counted(self._path, self.current)

    def close(self) -> None:
        """Closes the files that are open, the main one aside."""
        for _, _, lines in self._closed:
            lines.close()
        if self.number:
            self.current.close()

    def _rotate(self) -> None:
        path = self._directory / f"detail-{self.number + 1:06d}.jsonl"
        after = Lines(path, anew=True)  # an interruption may have left an empty one
        before, self.current = self.current, after  # another thread may still be writing to the one before
        number, self.number = self.number, self.number + 1
        path_before, self._path = self._path, path
        self._limit = Sizes.file
        if number:
            self._closed.append((number, _counted(path_before, before), before))
        while len(self._closed) > Sizes.last:
            number, path, lines = self._closed.popleft()
            lines.close()
            if self._eventful & {number - 1, number, number + 1} and self._kept < Sizes.around_events:
                self._kept += 1
            else:
                try:
                    samples, records = self._read(path)
                except FileNotFoundError:  # taken away by somebody: what was in it is lost, and the reader sees the gap
                    continue
                self._folded.merge(totals_of(samples, records, number))
                part = self._directory / (FOLDED + ".part")
                part.write_bytes(seal(folded_to_json(self._folded), 1) + b"\n")
                os.replace(part, self._directory / FOLDED)
                path.unlink()


def _counted(path: Path, lines: Lines) -> Path:
    """Puts the number of its lines into the name of a file; the new name.

    Raises:
        OSError: it cannot be renamed.
    """
    counted = path.rename(path.with_suffix(f".{lines.whole}.jsonl"))
    lines.moved(counted)
    return counted


def folded_to_json(folded: Folded) -> bytes:
    """One line of JSON."""
    return to_json({"e": "folded", **asdict(folded)}).encode("ascii")


def folded_from_json(line: bytes) -> Folded:
    """The value that :func:`folded_to_json` has written.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: the line is damaged.
    """
    value = from_json(line)
    return Folded(
        segments=[_whole(number) for number in value["segments"]],
        spans=[(_moment(first), _moment(last)) for first, last in value["spans"]],
        sites={int(site): decode(Total, total) for site, total in value["sites"].items()},
        metrics={str(name): decode(Total, total) for name, total in value["metrics"].items()},
        skipped=_whole(value["skipped"]),
    )


def _moment(value: Any) -> Moment:
    step, call = map(_whole, value)
    return step, call


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < math.inf:
        raise ValueError(value)
    return value


def totals_of(samples: Iterable[Sample], records: Iterable[Any], number: int) -> Folded:
    """The totals of one file, number ``number``, which holds at least one sample or record with a step."""
    samples, records = list(samples), [r for r in records if isinstance(r, (Metric, ScalerState))]
    moments = [(s.step, s.call) for s in samples] or [(r.step, 0) for r in records]
    found = Folded(segments=[number], spans=[(min(moments), max(moments))] if moments else [])
    found.add(samples, records)
    return found
