"""Runs a stage's workload on a CUDA stream of its own, and records on which streams the kernels of the model were launched."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import import_module

import torch

from dtypedoctor.instrument.cuda_streams import StreamWatch
from dtypedoctor.instrument.observing import observe
from dtypedoctor.trace.events import NotWatched
from dtypedoctor.trace.records.execution import StreamLaunches
from dtypedoctor.workloads.context import Context


@contextmanager
def streaming(context: Context) -> Iterator[None]:
    """Around a workload; streams exist on CUDA only. Where they are not looked at, that is recorded.

    Which stream a kernel is launched on can be seen where the model says which functions choose it
    (:class:`dtypedoctor.plugins.Model`). For each kind of launch a :class:`StreamLaunches` is written.
    """
    choosers = context.holder.built.stream_choosers if context.holder.built is not None else ()
    why_not = _why_not_watched(context)
    if why_not and (choosers or context.stage.side_stream):
        context.instruments.writer.write(NotWatched(what="CUDA streams", why=why_not))
    if context.device.type != "cuda":
        yield
        return
    listened_to = choosers if not why_not and context.instruments.watching else ()
    with ExitStack() as listening:
        watches = [listening.enter_context(_watch(chooser)) for chooser in listened_to]
        if context.stage.side_stream:
            torch.cuda.synchronize(context.device)  # what the default stream has prepared must be there
            with torch.cuda.stream(torch.cuda.Stream(context.device)):
                yield
            torch.cuda.synchronize(context.device)
        else:
            yield
    for watch in watches:
        _write(context, watch)


def _watch(chooser: str) -> StreamWatch:
    module, _, function = chooser.partition(":")
    return StreamWatch(import_module(module), function)


def _why_not_watched(context: Context) -> str:
    """Why launches are not listened to; empty if they are."""
    if context.device.type != "cuda":
        return "there is no CUDA device here"
    if context.stage.compile is not None:
        return "the model is compiled, and whoever listens would be compiled with it"
    return ""


def _write(context: Context, watch: StreamWatch) -> None:
    writer, position = context.instruments.writer, context.instruments.position
    for use in watch.uses():
        observe(writer, position, StreamLaunches(**asdict(use), stale=use.stale))
