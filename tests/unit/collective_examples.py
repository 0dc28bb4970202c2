"""Traces of collectives that are called with dtypes which do not fit."""

from traces import TraceBuilder

from dtypedoctor.diagnosis.distributed import Rank
from dtypedoctor.trace.events import Observed, Raised
from dtypedoctor.trace.records.execution import CollectiveCall

FOUND = "Invalid usage of tensors with different dtypesFound torch.float32 and  torch.float16"


def gathering(message: str = FOUND, *, api: str = "all_gather") -> TraceBuilder:
    """``api`` has raised; ``all_reduce`` stands for a call that torch.distributed has nothing to do with."""
    torch = (
        f"/site-packages/torch/distributed/distributed_c10d.py:7 {api}"
        if api != "all_reduce"
        else "/home/a/data.py:3 load"
    )
    frames = ["/home/a/train.py:12 main", torch, "/site-packages/torch/_ops.py:882 redispatch"]
    raised = Raised(n=9, step=1, call=0, phase="forward", type="ValueError", message=message, frames=frames, modules=[])
    return TraceBuilder().add(raised)


def calling(*calls: tuple[int, str, str], channel: str = "0", numel: int = 4) -> TraceBuilder:
    """Records of collectives: number, name and dtype, or name and line with a dtype, e.g. ``all_reduce@train.py:3``."""
    story = TraceBuilder()
    for number, name, dtype in calls:
        name, _, line = name.partition("@")
        what = CollectiveCall(
            channel=channel,
            number=number,
            name=name,
            dtype=dtype,
            shape=[numel],
            numel=numel,
            source=line or "train.py:3",
        )
        story.add(Observed(n=story.n(), step=1, call=0, phase="forward", what=what, fqn=""))
    return story


def rank(number: int, story: TraceBuilder) -> Rank:
    return Rank(number=number, trace=story.build(), code=0, ended="completed")
