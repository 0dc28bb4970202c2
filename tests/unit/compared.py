"""Hand-built runs for comparisons."""

from pathlib import Path
from typing import Any

from traces import TraceBuilder

from dtypedoctor.lab.compare.compare import compare_runs
from dtypedoctor.lab.compare.comparison import TraceComparison
from dtypedoctor.runner.run import Run, SavedRun, WorkerExit
from dtypedoctor.trace.model import Trace

OK = WorkerExit(code=0, timed_out=False, seconds=1.0)


def saved(trace: Trace, *, label: str = "runs/x/before", exit: WorkerExit = OK, **scenario: Any) -> SavedRun:
    """A run as it would be opened from disk."""
    run = Run(trace=trace, exit=exit, directory=Path(label))
    return SavedRun(label=label, run=run, request={"scenario": scenario} if scenario else {})


def compared(a: Trace | SavedRun, b: Trace | SavedRun, tolerance: float | None = 0.01) -> TraceComparison:
    sides = [
        side if isinstance(side, SavedRun) else saved(side, label=f"runs/{name}") for name, side in (("a", a), ("b", b))
    ]
    return compare_runs(sides[0], sides[1], tolerance)


def three_modules(*, scale: float = 1.0, dtype: str = "float16", **last: Any) -> TraceBuilder:
    """Two linear layers and the model around them, in one forward pass; ``last`` changes the second layer."""
    trace = TraceBuilder()
    trace.sample("layers.0", 2.0, dtype=dtype)
    trace.sample("layers.1", last.pop("absmax", 4.0 * scale), dtype=dtype, **last)
    return trace.sample("", 4.0 * scale, dtype=dtype, cls="Model")
