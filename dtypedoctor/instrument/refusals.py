"""Counterfactuals on the dtypes of one op: would it have run, or returned another dtype, had its operands agreed?"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dtypedoctor._torch_private import schema_of, tree_flatten, tree_map
from dtypedoctor.instrument.replay import run_again
from dtypedoctor.instrument.schema import Arguments
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.writer import TraceWriter


def replay_refused(writer: TraceWriter, of: int, func: Any, arguments: Arguments) -> None:
    """Runs an op that refused its operands again with other dtypes; nothing where their dtypes were equal.

    * ``equal-dtypes``: all in float32 (in float64 where one is), which shows that the dtypes alone were the reason.
    * ``all-as-DTYPE`` for each dtype among them: what would have happened had the region, the weights or the input agreed.
    * ``operand-I-as-DTYPE``: operand I alone cast, where all others agree. Success names the odd one.
    """
    leaves = [t for t in tree_flatten(arguments)[0] if isinstance(t, Tensor)]
    dtypes = _dtypes(leaves)
    if len(dtypes) < 2:
        return
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    run_again(writer, of, "equal-dtypes", func, _cast(arguments, partial(_always, wide)))
    for dtype in dtypes:
        run_again(writer, of, f"all-as-{_short(dtype)}", func, _cast(arguments, partial(_always, dtype)))
    for index, leaf in enumerate(leaves):
        to = _wanted_by_others(leaf, leaves) if measurable(leaf) else None
        if to is not None:
            run_again(writer, of, f"operand-{index}-as-{_short(to)}", func, _cast(arguments, partial(_only, leaf, to)))


def _wanted_by_others(operand: Tensor, operands: list[Tensor]) -> torch.dtype | None:
    """The dtype that all others have, where it is one and not the operand's."""
    others = _dtypes([t for t in operands if t is not operand])
    if len(others) != 1 or operand.dtype in others:
        return None
    return others[0]


def _dtypes(tensors: Iterable[object]) -> list[torch.dtype]:
    """The dtypes of those that can be measured, each once and in order."""
    return list(dict.fromkeys(t.dtype for t in tensors if isinstance(t, Tensor) and measurable(t)))


def replay_promotion(writer: TraceWriter, of: int, func: Any, arguments: Arguments, outputs: list[Tensor]) -> bool:
    """Where an op of mixed dtypes returned the widest of them, runs it again with all operands in the narrowest.

    The dtype of that result shows that the wider operand alone made it wide. Recorded as ``narrowest-dtype``.

    Returns:
        Whether there was anything to try.
    """
    if schema_of(func).is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    dtypes = _dtypes(tree_flatten(arguments)[0])
    if len({d.itemsize for d in dtypes}) < 2:
        return False
    narrow = min(dtypes, key=lambda d: d.itemsize)
    wider = {dtype for dtype in dtypes if dtype.itemsize > narrow.itemsize}
    if wider.isdisjoint(_dtypes(outputs)):
        return False
    run_again(writer, of, "narrowest-dtype", func, _cast(arguments, partial(_always, narrow)))
    return True


def _cast(arguments: Arguments, to: Callable[[Tensor], torch.dtype]) -> Arguments:
    """The arguments with every floating tensor copied, so that an op that writes to one changes nothing of the user's."""
    return tree_map(lambda v: v.detach().to(to(v), copy=True) if measurable(v) else v, arguments)


def _always(dtype: torch.dtype, _: Tensor) -> torch.dtype:
    return dtype


def _only(chosen: Tensor, dtype: torch.dtype, tensor: Tensor) -> torch.dtype:
    return dtype if tensor is chosen else tensor.dtype


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
