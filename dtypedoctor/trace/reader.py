"""Reads a trace back, whole or torn, and follows one that is still being written.

Modules are renamed where a model was put inside a larger one on the way, so that each has one name in a whole trace.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import open_file, read_head, reason
from dtypedoctor.trace.cursor import CURSOR, read_called, read_entered, read_mark, read_stopped
from dtypedoctor.trace.events import (
    End,
    Flow,
    Op,
    ParameterNote,
    Root,
    Sample,
    ScalerState,
    Site,
    TensorNote,
)
from dtypedoctor.trace.lines import EVENTS, open_lines
from dtypedoctor.trace.loader import DAMAGED, FOLDED, Loader, detail_files, folded_from_json
from dtypedoctor.trace.model import Cursor, Folded, Trace
from dtypedoctor.unpatched import from_json

LARGEST = 256 << 20
"""Bytes of the main file that are read; a writer begins another file after a sixteenth of it, unless a single step fills more."""
LARGEST_DETAILS = 64 << 20
MOST_DETAILS = 256
"""Bytes of a file of details, and files that are read. A writer keeps about thirty, of a megabyte each."""
_PAGE = 4096


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
    if len(data) == LARGEST:
        damage.append(f"only the first {LARGEST >> 20} MiB of {EVENTS} were read")
    page = _bytes_or_nothing(directory / CURSOR)[:_PAGE]
    folded = _read_details(directory, loader, damage)
    names = CanonicalNames([record for record in loader.records if isinstance(record, Root)])
    records = tuple(map(names.of, loader.records)) if names else tuple(loader.records)
    sites = {number: names.of(site) for number, site in loader.sites.items()} if names else loader.sites
    return Trace(
        records=records,
        samples=tuple(_described(_unfolded(loader.samples, folded), sites, damage)),
        sites=sites,
        damage=(*damage, *_recording_stopped(page)),
        stopped=read_stopped(page),
        cursor=_cursor(page, sites),
        collectives=read_entered(page),
        called=read_called(page),
        folded=folded,
    )


def _bytes(directory: Path, name: str) -> bytes:
    try:
        return read_head(directory / name, LARGEST)
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


def _unfolded(samples: list[Sample], folded: Folded | None) -> list[Sample]:
    if folded is not None and folded.spans:
        samples = [sample for sample in samples if not folded.holds((sample.step, sample.call))]
    samples.sort(key=attrgetter("n"))
    return samples


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


def _cursor(page: bytes, sites: dict[int, Site]) -> Cursor | None:
    mark = read_mark(page)
    return Cursor(n=mark.n, step=mark.step, call=mark.call, site=sites.get(mark.site)) if mark is not None else None


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
    if _optimized(trace):
        return trace
    return replace(
        trace,
        records=tuple(_renumbered(record) for record in trace.records),
        samples=tuple(replace(sample, step=max(sample.call, 1)) for sample in trace.samples),
        by_call=True,
        cursor=replace(trace.cursor, step=max(trace.cursor.call, 1)) if trace.cursor is not None else None,
    )


def _optimized(trace: Trace) -> bool:
    return (
        (trace.end is not None and trace.end.steps_completed > 0)
        or any(site.kind == "param" for site in trace.sites.values())
        or bool(trace.all(ScalerState))
    )


def _renumbered(record: Any) -> Any:
    if hasattr(record, "step") and hasattr(record, "call"):
        return replace(record, step=max(record.call, 1))
    return record


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What a worker is doing at this moment."""

    step: int
    phase: str
    module: str


class Follower:
    """Reads the cursor and the descriptions of modules of a growing trace; never blocks, never fails."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offset = 0
        self._sites: dict[int, tuple[str, str]] = {}

    def where(self) -> Where | None:
        """The module entered last; None before the first."""
        try:
            data = read_head(self._directory / CURSOR, _PAGE)
        except OSError:
            return None
        mark = read_mark(data)
        if mark is None:
            return None
        if mark.site not in self._sites:
            self._read_on()
        phase, fqn = self._sites.get(mark.site, ("", ""))
        return Where(step=mark.step, phase=phase, module=fqn)

    def _read_on(self) -> None:
        try:
            with open_file(self._directory / EVENTS) as file:
                file.seek(self._offset)
                data = file.read(LARGEST)
        except OSError:
            return
        whole, _, _ = data.rpartition(b"\n")
        self._offset += len(whole) + 1 if whole else 0
        for line in whole.split(b"\n"):
            if line.startswith(b'{"e":"site"'):
                try:
                    site = from_json(line)
                    self._sites[site["id"]] = (site.get("phase", ""), site.get("fqn", ""))
                except DAMAGED:  # somebody else writes here: what is going on is shown without it
                    continue
