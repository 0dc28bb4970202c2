"""Counterfactuals on one op, made while its operands are at hand."""

from typing import Any

import torch
from torch import Tensor

from dtypedoctor._torch_private import tree_flatten, tree_map, without_autocast
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.statistics import measurable, measure
from dtypedoctor.interruptions import contained
from dtypedoctor.redaction.messages import elided
from dtypedoctor.trace.events import Replay
from dtypedoctor.trace.writer import TraceWriter

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def replay_wider(writer: TraceWriter, of: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs op ``of`` on the same operands in float32 (in float64 where they were float32) and records whether it is finite.

    An op that cannot be replayed is recorded with the reason in ``note`` and ``finite`` False.
    """
    leaves = [t for t in tree_flatten((args, kwargs))[0] if measurable(t)]
    wide = torch.float64 if all(t.dtype is torch.float32 for t in leaves) else torch.float32

    def widen(value: Any) -> Any:
        if measurable(value):
            return value.to(wide)
        return wide if isinstance(value, torch.dtype) and value in _FLOATS else value

    run_again(writer, of, str(wide).removeprefix("torch."), func, tree_map(widen, (args, kwargs)))


def run_again(
    writer: TraceWriter, of: int, how: str, func: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]]
) -> None:
    """Runs ``func`` outside of autograd and autocast and records how it went as a replay of op ``of``."""
    args, kwargs = arguments
    with contained() as trial, torch.no_grad(), without_autocast():
        result = func(*args, **kwargs)
    if trial.error is not None:  # an experiment: whatever goes wrong is its result
        writer.write(
            Replay(n=writer.next_n(), of=of, how=how, finite=False, absmax=None, note=elided(str(trial.error))[:200])
        )
        return
    note_replay(writer, of, how, [t for t in tree_flatten(result)[0] if isinstance(t, Tensor)])


def note_replay(writer: TraceWriter, of: int, how: str, results: list[Tensor]) -> None:
    """Records what op ``of`` gives when it is run in the way ``how``."""
    results = [t for t in results if measurable(t)]
    extents = measure(results)
    writer.write(
        Replay(
            n=writer.next_n(),
            of=of,
            how=how,
            finite=all(e.finite for e in extents),
            absmax=max((e.absmax for e in extents), default=None),
            dtype=dtype_name(results[0]) if results else None,
        )
    )
