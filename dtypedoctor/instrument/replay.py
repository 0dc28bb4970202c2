"""Counterfactuals on one op, made while its operands are at hand."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

from dtypedoctor.instrument.statistics import measurable, measure
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

    _replay(writer, of, str(wide).removeprefix("torch."), func, tree_map(widen, (args, kwargs)))


def replay_equal_dtypes(writer: TraceWriter, of: int, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Runs an op that refused its operands again with all of them in the widest of their dtypes.

    Success shows that the dtypes alone were the reason. Nothing is recorded where the operands' dtypes were equal.
    """
    leaves = [t for t in tree_flatten((args, kwargs))[0] if measurable(t)]
    dtypes = {t.dtype for t in leaves}
    if len(dtypes) < 2:
        return
    common = torch.float32 if torch.float32 in dtypes or len(dtypes) > 1 else leaves[0].dtype

    def cast(value: Any) -> Any:
        return value.to(common, copy=True) if measurable(value) else value

    _replay(writer, of, "equal-dtypes", func, tree_map(cast, (args, kwargs)))


def _replay(
    writer: TraceWriter, of: int, how: str, func: Any, arguments: tuple[tuple[Any, ...], dict[str, Any]]
) -> None:
    args, kwargs = arguments
    try:
        with torch.no_grad(), torch._C._DisableAutocast():
            result = func(*args, **kwargs)
    except Exception as error:  # noqa: BLE001  (an experiment: whatever goes wrong is its result)
        writer.write(Replay(n=writer.next_n(), of=of, how=how, finite=False, absmax=None, note=str(error)[:200]))
        return
    results = [t for t in tree_flatten(result)[0] if isinstance(t, Tensor) and measurable(t)]
    extents = measure(results)
    writer.write(
        Replay(
            n=writer.next_n(),
            of=of,
            how=how,
            finite=all(e.finite for e in extents),
            absmax=max((e.absmax for e in extents), default=None),
        )
    )
