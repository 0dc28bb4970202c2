"""The collective operators of ``torch.distributed``: what their arguments mean, and when one is over."""

import sys
from typing import Any, NamedTuple

from torch import Tensor
from torch import distributed as dist


class Followed(NamedTuple):
    """A collective operator: its public name, and which of its arguments are its operands and its results."""

    name: str
    operands: int = 1
    results: int = 0


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
}
"""Operators of the namespace ``c10d``. Point-to-point messages have no counterpart on every rank and are left out."""


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


def work_of(answer: Any) -> Any:
    """What tells when the collective is over; None where a backend runs it in the order of the stream."""
    boxed = answer[-1] if isinstance(answer, tuple) else answer
    return dist.Work.unbox(boxed) if boxed is not None else None


def is_over(work: Any) -> bool:
    """Whether a collective is over and has not failed. Asks the backend, which asks its device, and waits for neither."""
    return work is None or (work.is_completed() and not _has_failed(work))


def _has_failed(work: Any) -> bool:
    try:
        return not work.is_success()
    except RuntimeError:  # the backend does not say
        return False


_BETWEEN = ("dtypedoctor.", "torch._dynamo")
"""Modules whose frames lie between the operator and who has called it."""


def called_from_python() -> bool:
    """Whether Python code has issued the collective, and not the reducer of DDP, which waits for it by itself."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(_BETWEEN):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and "/torch/distributed/" in frame.f_code.co_filename
