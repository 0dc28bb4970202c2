"""The collectives and messages of ``torch.distributed``: what each rank put in, and what came back.

A kernel of the dispatcher is put above the backends' own ones, so that collectives are seen whoever calls them: Python code,
FSDP, or the C++ reducer of ``DistributedDataParallel``. Operands are measured as the tensors of modules are, results once the
collective is known to have been waited for, or to be over. Nothing is waited for here. Only what is about to be overwritten is
measured at once: backends write to tensors without counting that, so that it would not be noticed later.

Each tensor is a sample of a site whose ``kind`` is ``sent`` or ``received``, whose ``cls`` is the collective, whose ``fqn`` is the
module (the shard unit, for FSDP) and whose ``index`` is ``GROUP:NUMBER``, the name of the process group and the tensor's number.
A rank issues the collectives of a group in the same order as the others, so that those of several traces can be matched. Of a
point-to-point message the ``cls`` is ``send`` or ``recv`` and the ``index`` is ``GROUP:FROM>TO`` on both sides, in ranks of the job.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch import distributed as dist

from dtypedoctor._torch_private import (
    COALESCING,
    COMPILER,
    UNIT_FILE,
    after_autograd,
    close_library,
    uncompiled,
    unit_fqn,
    version_of,
)
from dtypedoctor.instrument.frames import local_of, own_line
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.operators import FOLLOWED, MESSAGES, SHARED, Followed, tensors_of
from dtypedoctor.instrument.places import Looks, Place
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.ranks import Succession
from dtypedoctor.trace.records.execution import CollectiveCall, ProcessGroup


def root_of(name: str, args: tuple[Any, ...], group: int) -> int | None:
    """The rank (within the group) that a broadcast comes from, or that a reduction goes to."""
    if name == "broadcast":
        return int(args[group + 1])
    return int(args[group + 2]) if name == "reduce" else None


def route_of(name: str, args: tuple[Any, ...], place: int, group: Any) -> str:
    """``FROM>TO`` for a point-to-point message, with ``/TAG`` where it has one.

    Args:
        name: public name of the operator.
        args: its arguments.
        place: which of them is the group.
        group: the group; the ranks that are returned are those of the job.
    """
    peer, tag = int(args[place + 1]), int(args[place + 2])
    there = dist.get_process_group_ranks(group)[peer]
    here = dist.get_rank()
    ends = f"{here}>{there}" if name == "send" else f"{there}>{here}"
    return f"{ends}/{tag}" if tag else ends


def work_of(answer: Any) -> Any:
    """What tells when the collective is over; None where a backend runs it in the order of the stream."""
    boxed = answer[-1] if isinstance(answer, tuple) else answer
    return dist.Work.unbox(boxed) if boxed is not None else None


def is_over(work: Any) -> bool:
    """Whether a collective is over and has not failed. Asks the backend, which asks its device, and waits for neither."""
    return work is None or (work.is_completed() and not _has_failed(work))


def _has_failed(work: Any) -> bool:
    """Asked of its future, as torch warns the program where a work is asked itself."""
    try:
        future = work.get_future()
    except RuntimeError:  # the backend does not say
        return False
    try:
        if future.done():
            future.value()
    except RuntimeError:
        return True
    return False


_BETWEEN = ("dtypedoctor.", COMPILER)
"""Modules whose frames lie between the operator and who has called it."""


def called_from_python() -> bool:
    """Whether Python code has issued the collective, and not the reducer of DDP, which waits for it by itself."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and "/torch/distributed/" in frame.f_code.co_filename


def follow_works(
    waited: Callable[[Any, Any], None], coalescing: Callable[[], None], coalesced: Callable[[Any], None]
) -> Callable[[], None]:
    """Tells of works that somebody has waited for, and of operators that are put together.

    Args:
        waited: called with a work, and what waiting for it has returned.
        coalescing: called when a group begins to put operators together, which have no works of their own from then on.
        coalesced: called with the work of all of them (or None) when they are issued.

    Returns:
        What puts everything back.
    """
    undo: list[Callable[[], None]] = []

    def after(owner: Any, name: str, told: Callable[[Any, Any], None]) -> None:
        original = getattr(owner, name)

        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            told(self, result)
            return result

        setattr(owner, name, watched)
        undo.append(lambda: setattr(owner, name, original))

    for kind in (dist.Work, *dist.Work.__subclasses__()):
        if "wait" in vars(kind):
            after(kind, "wait", waited)
    start, end = COALESCING
    after(dist.ProcessGroup, start, lambda *_: coalescing())
    after(dist.ProcessGroup, end, lambda _, work: coalesced(work))

    def put_back() -> None:
        while undo:
            undo.pop()()

    return put_back


SENT, RECEIVED = "sent", "received"

MAX_PENDING = 64
"""Collectives whose results are waited for at a time; their tensors are kept alive until then."""

MOST_UNREAD = 512
"""Buffers that are remembered before those are looked for of which nothing waits to be measured any more."""

_UNIT_DEPTH = 12

Row = tuple[Place, Looks, Tensor]
"""A tensor, where it is measured, and as what."""


@dataclass(frozen=True, slots=True)
class _Pending:
    """A collective that has been issued.

    Attributes:
        work: tells when it is over; None for one that runs in the order of the current stream.
        rows: its results.
        versions: of the results when it was issued; another one later means that somebody has written to them since.
        ends_with_backward: whether the reducer of DDP waits for it before the backward pass returns.
    """

    work: Any
    rows: list[Row]
    versions: list[int]
    ends_with_backward: bool

    def unchanged(self) -> list[Row]:
        """The results that nobody has written to since."""
        return [row for row, version in zip(self.rows, self.versions, strict=True) if version_of(row[2]) == version]


_Call = tuple[str, str, str | None, str]
"""Name, dtype, line and module of a collective: what is the same when a program does the same again."""


class _Channel:
    """What is called on a process group, or sent from one rank to another, in order.

    Args:
        number: its place among the channels of this process.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0
        self._calls: Succession[_Call] = Succession()

    def goes_on(self, name: str, dtype: str) -> bool:
        """Counts a call if it is, by its name and dtype, the one that was to be expected."""
        if not self._calls.goes_on((name, dtype)):
            return False
        self.count += 1
        return True

    def is_new(self, call: _Call) -> bool:
        """Counts a call, and says whether it is another one than the reader of the trace will expect."""
        known = self._calls.expected() == call
        self._calls.came(call)
        self.count += 1
        return not known


class Collectives:
    """Watches the collectives of this process from the moment at which it belongs to a group.

    In steps that are not looked at calls are counted alone. For each process group a :class:`ProcessGroup` is written.

    Args:
        session: where groups are described; knows the modules that are open.
        sample: measures rows; the second argument says whether now, or with what else there is to measure.
    """

    def __init__(self, session: Session, sample: Callable[[Sequence[Row], bool], None]) -> None:
        self._session = session
        self._position, self._names, self._guard = session.position, session.names, session.guard
        self._sample = sample
        self._expected = "WORLD_SIZE" in os.environ
        self._library: torch.library.Library | None = None
        self._undo: Callable[[], None] = lambda: None
        self._pending: list[_Pending] = []
        self._coalesced: list[Row] | None = None
        self._unread: dict[int, ref[Tensor]] = {}
        self._places: dict[tuple[int, str, str], Place] = {}
        self._groups: set[str] = set()
        self._channels: dict[str, _Channel] = {}
        self._inside = False
        self._on_issued = self._guard.shield(self._issued, "the inputs of some collectives")
        self._on_returned = self._guard.shield(self._returned, "the results of some collectives")

    def start(self) -> None:
        """Begins to watch if the process belongs to a group, or has been started to; cheap to call again."""
        if (
            self._library is None
            and after_autograd is not None
            and dist.is_available()
            and (self._expected or dist.is_initialized())
        ):
            self._install()

    def stop(self) -> None:
        """Stops watching; results that have not been waited for stay unknown."""
        self.settle()
        self._pending.clear()
        self._coalesced = None
        self._remove()

    def keep_compiler_out(self) -> None:
        """Dynamo has been imported: the kernels are wrapped so that it leaves them alone."""
        if self._library is not None:
            self._remove()
            self._install()

    def _remove(self) -> None:
        if self._library is None:
            return
        self._undo()
        close_library(self._library)
        self._library = None

    def settle(self, *, backward_is_over: bool = False) -> None:
        """Measures the results of collectives that are known to be over."""
        if not self._pending or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        waiting, self._pending = self._pending, []
        for one in waiting:
            if backward_is_over and one.ends_with_backward:
                self._measure(one.rows)
            elif is_over(one.work):
                self._measure(one.unchanged())
            else:
                self._pending.append(one)

    def _install(self) -> None:
        library = self._library = torch.library.Library("c10d", "IMPL")
        for name, followed in FOLLOWED.items():
            packet = getattr(torch.ops.c10d, name, None)
            if packet is not None:
                library.impl(name, self._kernel(packet.default, followed), "ADInplaceOrView", with_keyset=True)
        shield, what = self._guard.shield, "the results of some collectives"
        measure, watch = shield(self._waited, what), ref(self)

        def waited(work: Any, _: Any) -> None:
            here = watch()
            if here is not None and here._pending:  # nothing between looks
                measure(work)

        self._undo = follow_works(waited, shield(self._coalescing, what), shield(self._issued_together, what))

    def _kernel(self, operator: Any, followed: Followed) -> Callable[..., Any]:
        watch = ref(self)  # torch keeps every kernel, also one that was taken out, and would keep the model with it

        def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
            here = watch()
            if here is None or here._inside:  # a torch mode has seen the operator, and calls it anew
                return operator.redispatch(keyset & after_autograd, *args, **kwargs)
            results: list[Row] = []
            here._inside = True
            try:
                here._on_issued(followed, args, results)
                answer = operator.redispatch(keyset & after_autograd, *args, **kwargs)
                if results:
                    here._on_returned(answer, results)
            finally:
                here._inside = False
            return answer

        return uncompiled(kernel) or kernel

    def _issued(self, followed: Followed, args: tuple[Any, ...], results: list[Row]) -> None:
        """Notes the call; in a look it measures the operands and says where the results will be."""
        place = 0
        while not isinstance(args[place], torch.ScriptObject):
            place += 1
        group = dist.ProcessGroup.unbox(args[place])
        name = group.group_name
        if name not in self._groups:
            self._describe(name, group)
        route = route_of(followed.name, args, place, group) if followed.name in MESSAGES else None
        there = f"{name}:{route or ''}"
        self._note_call(followed, there if route else name, args)
        if not self._position.looks:
            return
        self.settle()
        root = root_of(followed.name, args, place)
        if followed.results is not None and self._about_to_overwrite(args[followed.results]):
            self._sample((), True)
        is_root = root is None or root == group.rank()
        sends = is_root or followed.name != "broadcast"
        receives = is_root or followed.name != "reduce"
        if followed.operands is not None and sends:
            rows = list(self._rows(followed.name, SENT, there, args[followed.operands]))
            self._measure(rows, at_once=followed.operands == followed.results)
        if followed.results is not None and receives:
            results += self._rows(followed.name, RECEIVED, there, args[followed.results])

    def _note_call(self, followed: Followed, channel: str, args: tuple[Any, ...]) -> None:
        """Writes what this rank calls, before it can wait for ever, unless it is what was to be expected."""
        tensors = tensors_of(args[followed.operands]) if followed.operands is not None else []
        if not tensors and followed.results is not None:
            tensors = tensors_of(args[followed.results])
        is_shared = followed.name in SHARED
        if not tensors:
            self._session.writer.called_collective(None, is_shared=is_shared)
            return
        dtype = dtype_name(tensors[0])
        here = self._channels.get(channel)
        if here is None:
            here = self._channels[channel] = _Channel(len(self._channels))
        # Lines and modules are asked for in looks alone.
        if self._position.looks or not here.goes_on(followed.name, dtype):
            line, (_, unit) = own_line(sys._getframe()), self._unit()
            source, number = line.source if line is not None else None, here.count
            if here.is_new((followed.name, dtype, source, unit)):
                call = CollectiveCall(
                    channel=channel,
                    number=number,
                    name=followed.name,
                    dtype=dtype,
                    shape=list(tensors[0].shape),
                    numel=sum(tensor.numel() for tensor in tensors),
                    source=source,
                )
                self._session.emit(call, fqn=unit)
        self._session.writer.called_collective((here.number, here.count), is_shared=is_shared)

    def _returned(self, answer: Any, rows: list[Row]) -> None:
        if self._coalesced is not None:
            self._coalesced += rows
        else:
            self._await(work_of(answer), rows)

    def _await(self, work: Any, rows: list[Row]) -> None:
        by_reducer = not called_from_python()
        pending = _Pending(work, rows, [version_of(tensor) for _, _, tensor in rows], by_reducer)
        if work is None:
            self._measure(rows)
        else:
            self._pending = [*self._pending[1 - MAX_PENDING :], pending]

    def _coalescing(self) -> None:
        """From here on nothing is sent until all that is put together is."""
        self._coalesced = []

    def _issued_together(self, work: Any) -> None:
        rows, self._coalesced = self._coalesced, None
        if rows:
            self._await(work, rows)

    def _waited(self, work: Any) -> None:
        """Somebody has waited: what comes next on the current stream sees the result."""
        ready = [one for one in self._pending if one.work is work]
        self._pending = [one for one in self._pending if one.work is not work]
        for one in ready:
            self._measure(one.rows)

    def _measure(self, rows: list[Row], *, at_once: bool = False) -> None:
        if not rows:
            return
        self._sample(rows, at_once)
        if not at_once:
            self._unread |= {tensor.untyped_storage().data_ptr(): ref(tensor) for _, _, tensor in rows}
        if len(self._unread) > MOST_UNREAD:
            self._unread = {address: held for address, held in self._unread.items() if held() is not None}

    def _about_to_overwrite(self, results: Any) -> bool:
        """Whether memory is written to now that may still have to be measured."""
        found = False
        for tensor in filter(measurable, tensors_of(results) if self._unread else ()):
            held = self._unread.pop(tensor.untyped_storage().data_ptr(), None)
            found = found or (held is not None and held() is not None)
        return found

    def _rows(self, name: str, kind: str, there: str, value: Any) -> Iterator[Row]:
        root, fqn = self._unit()
        place = self._places.setdefault((root, fqn, name), Place(root, fqn, name))
        phase = self._position.phase
        for number, tensor in enumerate(tensors_of(value)):
            if measurable(tensor):
                index = f"{there}{number}" if there.endswith(":") else there  # a message has one tensor
                looks = Looks(phase, kind, index, tensor.dtype, tensor.shape, None, tensor.device)
                yield place, looks, tensor.detach()  # backends write without counting, so the object must be a new one

    def _unit(self) -> tuple[int, str]:
        """The module that a collective belongs to: that of FSDP that issues it, else the innermost that is open."""
        frame = sys._getframe()
        for _ in range(_UNIT_DEPTH):
            following = frame.f_back
            if following is None:
                break
            frame = following
            if frame.f_code.co_filename.endswith(UNIT_FILE):
                return 0, unit_fqn(local_of(frame, "self"))
        stack = self._position.stack
        return (self._names.find(stack[-1]) if stack else None) or (0, "")

    def _describe(self, name: str, group: Any) -> None:
        self._groups.add(name)
        described = ProcessGroup(
            name=name,
            ranks=dist.get_process_group_ranks(group),
            backend=dist.get_backend(group),
            rank=dist.get_rank(),
        )
        self._session.emit(described)
