"""Which parameters FSDP shards together, noted before it is asked to."""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from dtypedoctor._torch_private import SHARDING_COPIES, unit_policy
from dtypedoctor.instrument.frames import source_of
from dtypedoctor.instrument.guard import Guard
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.observing import observe
from dtypedoctor.instrument.position import Position
from dtypedoctor.trace.records.models import ShardCall, ShardUnit
from dtypedoctor.trace.writer import TraceWriter

SHARDING = "torch.distributed.fsdp"
"""The module that holds both generations of FSDP; it is not imported for this."""

_POLICY = ("param_dtype", "reduce_dtype", "output_dtype")


class ShardCalls:
    """Follows the calls that make shard units, once :data:`SHARDING` has been imported.

    Writes a :class:`ShardCall` before each ``fully_shard``, and where FSDP1 refuses a unit.
    """

    def __init__(self, writer: TraceWriter, position: Position, guard: Guard) -> None:
        self._writer = writer
        self._position = position
        self._guard = guard
        self._undo: list[Callable[[], None]] = []
        self._refused = 0
        self._watching = False

    def start(self) -> None:
        """Begins to watch."""
        self._watching = True
        self.follow()

    def follow(self) -> None:
        """FSDP may have been imported; does nothing where it has not, or while nothing is watched."""
        sharding = sys.modules.get(SHARDING)
        if sharding is None or self._undo or not self._watching:
            return
        original = sharding.fully_shard
        wrapped = self._before_fully_shard(original)
        for name in (SHARDING, *SHARDING_COPIES):
            owner = sys.modules.get(name)
            if getattr(owner, "fully_shard", None) is original:
                self._replace(owner, "fully_shard", wrapped)
        first = sharding.FullyShardedDataParallel
        self._replace(first, "__init__", self._around_first(first.__init__))

    def stop(self) -> None:
        """Puts everything back."""
        self._watching = False
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        original = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, original))

    def _before_fully_shard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = self._guard.shield(self._note, "some calls of fully_shard")

        @functools.wraps(original)
        def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
            note(module, "fully_shard", kwargs)
            return original(module, *args, **kwargs)

        return fully_shard

    def _around_first(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = self._guard.shield(self._note, "what FSDP1 refused")

        @functools.wraps(original)
        def wrap(unit: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            try:
                original(unit, module, *args, **kwargs)
            except ValueError as error:
                if self._refused != id(error):  # the innermost unit is the one that was refused
                    self._refused = id(error)
                    note(module, "FullyShardedDataParallel", {})
                raise

        return wrap

    def _note(self, wanted: Any, api: str, given: dict[str, Any]) -> None:
        modules = list(wanted) if isinstance(wanted, (list, tuple)) else [wanted]
        left_out = {id(parameter) for parameter in given.get("ignored_params") or ()}
        held = [
            (name, parameter)
            for module in modules
            for name, parameter in _own_parameters(module)
            if id(parameter) not in left_out
        ]
        called = ShardCall(
            api=api,
            cls=", ".join(type(module).__name__ for module in modules),
            source=source_of(sys._getframe()),
            dtypes=_by_dtype(held),
            trainable=_by_dtype((name, p) for name, p in held if p.requires_grad),
            **_dtypes_of(given.get("mp_policy")),
        )
        observe(self._writer, self._position, called)


def shard_units(module: nn.Module, root: int) -> Iterator[tuple[str, ShardUnit]]:
    """Each unit of FSDP2 in ``module``, which is the outermost module number ``root``, with its dotted name."""
    kind = getattr(sys.modules.get(SHARDING), "FSDPModule", None)
    units = {name: child for name, child in module.named_modules() if kind is not None and isinstance(child, kind)}
    for name, unit in units.items():
        prefix = f"{name}." if name else ""
        named = [(prefix + own, parameter) for own, parameter in _own_parameters(unit)]
        yield (
            name,
            ShardUnit(
                root=root,
                dtypes=_by_dtype(named),
                trainable=_by_dtype((own, p) for own, p in named if p.requires_grad),
                **_dtypes_of(unit_policy(unit)),
            ),
        )


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of ``module`` that are in none of the units of FSDP inside of it."""
    sharding = sys.modules[SHARDING]
    kinds = (sharding.FSDPModule, sharding.FullyShardedDataParallel)
    prefixes = tuple(f"{name}." for name, child in module.named_modules() if name and isinstance(child, kinds))
    for name, parameter in module.named_parameters():
        if not name.startswith(prefixes):
            yield name, parameter


def _by_dtype(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, parameter in parameters:
        found.setdefault(dtype_name(parameter), []).append(name)
    return found


def _dtypes_of(policy: Any) -> dict[str, str | None]:
    found = {key: getattr(policy, key, None) for key in _POLICY}
    return {key: str(dtype).removeprefix("torch.") if dtype is not None else None for key, dtype in found.items()}
