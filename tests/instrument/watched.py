"""Runs a piece of code under the instruments and reads its trace."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dtypedoctor.instrument.budget import Budget
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.instrument.optrace import OpWindow
from dtypedoctor.trace.events import End, Header
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.reader import read_trace
from dtypedoctor.trace.writer import TraceWriter


def watched(
    directory: Path, work: Callable[[Instruments], Any], window: OpWindow | None = None, *, watch: bool = True,
    every: int = 1, budget: Budget | None = None,
) -> Trace:  # fmt: skip
    """The trace of ``work``; an exception that it raises is recorded as the worker would."""
    writer = TraceWriter(directory)
    writer.write(Header(watched=watch))
    windows = [window] if window is not None else []
    instruments = Instruments(writer, watch=watch, windows=windows, every=every, budget=budget)
    instruments.start()
    outcome = "completed"
    try:
        work(instruments)
    except Exception as error:  # noqa: BLE001  (the code under test may raise anything)
        instruments.note_exception(error)
        outcome = "raised"
    finally:
        instruments.stop()
    writer.write(End(n=writer.next_n(), outcome=outcome, steps_completed=0))
    writer.close()
    return read_trace(directory)
