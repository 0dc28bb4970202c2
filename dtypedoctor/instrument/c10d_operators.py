"""The operators of ``torch.distributed`` that communicate: what their arguments mean, and when one is over."""

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor
from torch import distributed as dist

from dtypedoctor._torch_private import COALESCING, COMPILER


class Followed(NamedTuple):
    """An operator: its public name, and which of its arguments are its operands and its results, None where it has none."""

    name: str
    operands: int | None = 1
    results: int | None = 0


_IN_PLACE = 0
FOLLOWED = {
    "allreduce_": Followed("all_reduce", _IN_PLACE),
    "allreduce_coalesced_": Followed("all_reduce", _IN_PLACE),
    "broadcast_": Followed("broadcast", _IN_PLACE),
    "reduce_": Followed("reduce", _IN_PLACE),
    "allgather_": Followed("all_gather"),
    "_allgather_base_": Followed("all_gather"),
    "allgather_coalesced_": Followed("all_gather"),
    "allgather_into_tensor_coalesced_": Followed("all_gather"),
    "reduce_scatter_": Followed("reduce_scatter"),
    "_reduce_scatter_base_": Followed("reduce_scatter"),
    "reduce_scatter_tensor_coalesced_": Followed("reduce_scatter"),
    "gather_": Followed("gather"),
    "scatter_": Followed("scatter"),
    "alltoall_": Followed("all_to_all"),
    "alltoall_base_": Followed("all_to_all"),
    "send": Followed("send", _IN_PLACE, None),
    "recv_": Followed("recv", None, _IN_PLACE),
}
"""Operators of the namespace ``c10d``."""
SHARED = frozenset(one.name for one in FOLLOWED.values()) - {"broadcast", "scatter", "send", "recv"}
"""Collectives to which every rank of the group sends something."""


def flat(value: Any) -> list[Tensor]:
    """The tensors in an argument: one, a list, or a list of lists."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in flat(item)]


def root_of(name: str, args: tuple[Any, ...], group: int) -> int | None:
    """The rank (within the group) that a broadcast comes from, or that a reduction goes to."""
    if name == "broadcast":
        return int(args[group + 1])
    return int(args[group + 2]) if name == "reduce" else None


def route_of(name: str, args: tuple[Any, ...], place: int, group: Any) -> str | None:
    """``FROM>TO`` for a point-to-point message, with ``/TAG`` where it has one; None for a collective.

    Args:
        name: public name of the operator.
        args: its arguments.
        place: which of them is the group.
        group: the group; the ranks that are returned are those of the job.
    """
    if name not in ("send", "recv"):
        return None
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
    waited: Callable[[Any], None], coalescing: Callable[[], None], coalesced: Callable[[Any], None]
) -> Callable[[], None]:
    """Tells of works that somebody has waited for, and of operators that are put together.

    Args:
        waited: called with a work when waiting for it is over.
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
            after(kind, "wait", lambda work, _: waited(work))
    start, end = COALESCING
    after(dist.ProcessGroup, start, lambda *_: coalescing())
    after(dist.ProcessGroup, end, lambda _, work: coalesced(work))

    def put_back() -> None:
        while undo:
            undo.pop()()

    return put_back
