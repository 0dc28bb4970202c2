"""Keeps one module's call of a workload, where the request asks for that."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.capture import Capture
from dtypedoctor.scenario.request import Capture as Wanted
from dtypedoctor.workloads.context import Context


@contextmanager
def capturing(context: Context, wanted: Wanted | None, directory: Path) -> Iterator[None]:
    """Inside, the wanted call is watched for; it is written to ``directory`` at the end, also when the workload raises.

    Raises:
        UsageError: the model has no such module.
    """
    if wanted is None or context.holder.built is None:
        yield
        return
    position = context.instruments.position
    try:
        capture = Capture(context.built.model, wanted.module, own=wanted.own, call=wanted.call, position=position)
    except KeyError:
        raise UsageError(f"the model has no module {wanted.module!r} to capture") from None
    try:
        yield
    finally:
        capture.write(directory)
