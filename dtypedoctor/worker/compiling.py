"""Compiles a stage's model and records what the compiler gave up on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dtypedoctor.instrument.compile_events import CompileWatch, observations
from dtypedoctor.instrument.observing import observe
from dtypedoctor.workloads.context import Context


@contextmanager
def compiling(context: Context) -> Iterator[None]:
    """Inside, ``context.model`` is compiled if the stage asks for it; what Dynamo reports is recorded at the end.

    The records are written also when the workload raises: with ``fullgraph`` a graph break is an exception.
    """
    spec = context.stage.compile
    if spec is None:
        yield
        return
    model = context.built.model
    compiled: Any = torch.compile(model, backend=spec.backend, fullgraph=spec.fullgraph, dynamic=spec.dynamic)
    context.compiled = compiled
    context.instruments.name_as(compiled, model)
    if not context.instruments.watching:
        yield
        return
    watch = CompileWatch()
    try:
        with watch:
            yield
    finally:
        writer, position = context.instruments.writer, context.instruments.position
        for what, fqn in observations(watch.report(), context.instruments.code_places.module_at):
            observe(writer, position, what, fqn=fqn, phase="compile")
