"""Runs a piece of code under the instruments and reads its trace."""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from dtypedoctor.instrument.budget import Budget
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.instrument.optrace import OpTrace
from dtypedoctor.instrument.whereabouts import call_arguments
from dtypedoctor.trace.events import End, Header
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.reader import read_trace
from dtypedoctor.trace.writer import TraceWriter

MMAP_THRESHOLD = -3
"""Of glibc's `mallopt`."""


def watched(
    directory: Path, work: Callable[[Instruments], Any], *, traced: bool = False, watch: bool = True,
    every: int = 1, budget: Budget | None = None, look_steps: int | None = None,
) -> Trace:  # fmt: skip
    """The trace of ``work``, with the op trace if it is to be ``traced``; an exception that it raises is recorded as the worker would."""
    writer = TraceWriter(directory)
    writer.write(Header(watched=watch))
    budget = budget if every == 1 else Budget(every=every)
    instruments = Instruments(writer, watch=watch, budget=budget, look_steps=look_steps)
    instruments.start()
    outcome = "completed"
    try:
        with op_trace(instruments) if traced else nullcontext():
            work(instruments)
    except Exception as error:  # noqa: BLE001  (the code under test may raise anything)
        instruments.note_exception(error)
        outcome = "raised"
    finally:
        instruments.stop()
    writer.write(End(n=writer.next_n(), outcome=outcome, steps_completed=0))
    writer.close()
    return read_trace(directory)


@contextmanager
def op_trace(instruments: Instruments) -> Iterator[None]:
    """Inside, every operator is recorded with its operands, as those of a replay are."""
    ops, modules = OpTrace(instruments.session, instruments.in_place._originals), instruments.modules
    modules.before_root.insert(0, lambda module: ops.enter_root(*call_arguments(module)))
    modules.after_root.insert(0, lambda module: ops.leave_root())
    modules.on_error.insert(0, ops.refused_by_module)
    instruments.sentinel.quiet = lambda: True
    if (setting := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        setting(
            MMAP_THRESHOLD, 1 << 20
        )  # copies that live for one operator leave no holes between the blocks of the program
    ops.open(outside=True)
    try:
        yield
    finally:
        ops.close()
