"""Runs a stage's workload on a CUDA stream of its own, and records which streams the NF4 fast path launched on."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict

import torch

from dtypedoctor.instrument.cuda_streams import StreamWatch
from dtypedoctor.kernels import nf4_ctypes
from dtypedoctor.models.nf4_compiled import Nf4LoraLinear
from dtypedoctor.trace.events import NotWatched, Observation
from dtypedoctor.workloads.context import Context


@contextmanager
def streaming(context: Context) -> Iterator[None]:
    """Around a workload; streams exist on CUDA only. Where they are not looked at, that is recorded.

    For each kind of launch an :class:`Observation` ``cuda-stream`` is written: ``device``, ``used`` and ``current``
    (handles), ``count`` and ``stale``.
    """
    launches = _has_fast_path(context)
    why_not = _why_not_watched(context)
    if why_not and (launches or context.stage.side_stream):
        context.instruments.writer.write(NotWatched(what="CUDA streams", why=why_not))
    if context.device.type != "cuda":
        yield
        return
    watch = StreamWatch(nf4_ctypes, "launch_stream")
    with watch if launches and not why_not and context.instruments.watching else nullcontext():
        if context.stage.side_stream:
            torch.cuda.synchronize(context.device)  # what the default stream has prepared must be there
            with torch.cuda.stream(torch.cuda.Stream(context.device)):
                yield
            torch.cuda.synchronize(context.device)
        else:
            yield
    _write(context, watch)


def _why_not_watched(context: Context) -> str:
    """Why launches are not listened to; empty if they are."""
    if context.device.type != "cuda":
        return "there is no CUDA device here"
    if context.stage.compile is not None:
        return "the model is compiled, and whoever listens would be compiled with it"
    return ""


def _has_fast_path(context: Context) -> bool:
    built = context.holder.built
    return built is not None and any(isinstance(module, Nf4LoraLinear) for module in built.model.modules())


def _write(context: Context, watch: StreamWatch) -> None:
    writer, position = context.instruments.writer, context.instruments.position
    for use in watch.uses():
        writer.write(
            Observation(
                n=writer.next_n(),
                step=position.step,
                call=position.call,
                phase=position.phase,
                kind="cuda-stream",
                values=asdict(use) | {"stale": use.stale},
            )
        )
