"""What an operator's signature says about a call of it: which tensors it gets, which it writes to, which numbers decide."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dtypedoctor._torch_private import schema_of

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call."""


_COLLECTIVES = frozenset({"c10d", "_c10d_functional"})
_BEFORE_A_COLLECTIVE = frozenset({"fsdp.all_gather_copy_in.default"})
_UNCOMPUTED = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_", "resize_as_", "set_"}
)


def flat(value: Any) -> Iterator[Any]:
    """Everything inside nested lists, tuples and dicts, in order."""
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from flat(item)
    elif isinstance(value, dict):
        yield from flat(list(value.values()))
    else:
        yield value


def tensors_of(value: Any) -> list[Tensor]:
    """Every tensor inside nested lists, tuples and dicts, in order."""
    return [item for item in flat(value) if isinstance(item, Tensor)]


def is_unfinished(func: Any) -> bool:
    """Whether the results of an operator hold nothing yet when it returns: a collective at work, or what it is to fill.

    Such an operator is neither measured nor ever run again: one rank that repeats a collective alone breaks those of all.
    """
    return func.namespace in _COLLECTIVES or str(func) in _BEFORE_A_COLLECTIVE


def leaves_memory_as_it_was(func: Any) -> bool:
    """Whether nothing has computed what an operator returns: what is in there was left behind by somebody else."""
    return schema_of(func).name.split("::")[-1] in _UNCOMPUTED


def is_inplace(func: Any) -> bool:
    """Whether the operator writes to its first argument, as ``add_`` does."""
    return bool(schema_of(func).name.split("::")[-1].endswith("_")) and schema_of(func).is_mutable


def has_out(func: Any) -> bool:
    """Whether the operator fills memory that it is given: an ``out=`` argument, or a tensor where it returns nothing."""
    schema = schema_of(func)
    if any(argument.is_out for argument in schema.arguments):
        return True
    given = {argument.name for argument in schema.arguments if str(argument.type) == "Tensor"}
    return not schema.returns and bool(given & set(_written_names(func)))


def written(func: Any, arguments: Arguments) -> list[Tensor]:
    """The tensors that a call writes to."""
    args, kwargs = arguments
    names = _written_names(func)
    if not names:
        return []
    positions = [argument.name for argument in schema_of(func).arguments]
    found = [value for name, value in zip(positions, args, strict=False) if name in names]
    return tensors_of([*found, *(value for name, value in kwargs.items() if name in names)])


def keep_written(func: Any, arguments: Arguments) -> Arguments:
    """The arguments with a copy of everything that the call writes to, so that it can be made again later."""
    names = _written_names(func)
    if not names:
        return arguments
    args, kwargs = arguments
    positions = [argument.name for argument in schema_of(func).arguments]
    kept = tuple(
        value.clone() if isinstance(value, Tensor) and i < len(positions) and positions[i] in names else value
        for i, value in enumerate(args)
    )
    return kept, {k: v.clone() if k in names and isinstance(v, Tensor) else v for k, v in kwargs.items()}


def scalars(arguments: Arguments) -> list[str]:
    """The numbers, strings and dtypes among the arguments, as text."""
    return [str(v)[:40] for v in flat(arguments) if isinstance(v, (bool, int, float, str, torch.dtype))]


def _written_names(func: Any) -> set[str]:
    if not schema_of(func).is_mutable:
        return set()
    return {a.name for a in schema_of(func).arguments if a.alias_info is not None and a.alias_info.is_write}
