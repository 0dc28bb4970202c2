"""What models say about their own dtypes: configurations, lists of modules to keep in float32, shard units."""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import SHARDING_COPIES, unit_policy
from dtypedoctor.instrument.frames import source_of
from dtypedoctor.instrument.module_tree import attribute_of, modules_in, named_modules, named_tensors
from dtypedoctor.instrument.naming import dtype_name, quantization_of, short_name
from dtypedoctor.instrument.packed_weights import packed_attributes
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.trace.events import ParameterNote
from dtypedoctor.trace.records.execution import ModelConfig, ShardCall, ShardUnit

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

SHARDING = "torch.distributed.fsdp"
"""The module that holds both generations of FSDP; it is not imported for this."""

_POLICY = ("param_dtype", "reduce_dtype", "output_dtype")


class ShardCalls(Observer):
    """Follows the calls that make shard units: what FSDP shards together, noted before it is asked to.

    Writes a :class:`ShardCall` before each ``fully_shard``, and where FSDP1 rejects a unit.
    """

    waits_for = (SHARDING,)

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._refused = 0

    def imported(self, module: str) -> None:
        """FSDP has been imported."""
        sharding = sys.modules[module]
        original = sharding.fully_shard
        wrapped = self._before_fully_shard(original)
        for name in (SHARDING, *SHARDING_COPIES):
            owner = sys.modules.get(name)
            if getattr(owner, "fully_shard", None) is original:
                self.replace(owner, "fully_shard", wrapped)
        first = sharding.FullyShardedDataParallel
        self.replace(first, "__init__", self._around_first(first.__init__))

    def _before_fully_shard(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = self.session.guard.shield(self._note, "some calls of fully_shard")

        @functools.wraps(original)
        def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
            note(module, "fully_shard", kwargs)
            return original(module, *args, **kwargs)

        return fully_shard

    def _around_first(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = self.session.guard.shield(self._note, "what FSDP1 refused")

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
        self.session.emit(called)


def shard_units(module: nn.Module, root: int) -> Iterator[tuple[str, ShardUnit]]:
    """Each unit of FSDP2 in ``module``, which is the outermost module number ``root``, with its dotted name."""
    kind = getattr(sys.modules.get(SHARDING), "FSDPModule", None)
    units = {name: child for name, child in named_modules(module) if kind is not None and isinstance(child, kind)}
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


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of ``module`` that are in none of the units of FSDP inside of it."""
    sharding = sys.modules[SHARDING]
    kinds = (sharding.FSDPModule, sharding.FullyShardedDataParallel)
    prefixes = tuple(f"{name}." for name, child in named_modules(module) if name and isinstance(child, kinds))
    for name, parameter in named_tensors(module, buffers=False):
        if not name.startswith(prefixes):
            yield name, parameter


def _by_dtype(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, parameter in parameters:
        found.setdefault(dtype_name(parameter), []).append(name)
    return found


def _dtypes_of(policy: Any) -> dict[str, str | None]:
    found = {key: getattr(policy, key, None) for key in _POLICY}
    return {key: short_name(dtype) if dtype is not None else None for key, dtype in found.items()}


_KEEP_LISTS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


class ModelFacts(Observer):
    """Writes, when an outermost module is first called, each :class:`ModelConfig` and :class:`ShardUnit` of it and the modules inside it."""

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._told: set[int] = set()

    def before_call(self, module: nn.Module) -> None:
        """An outermost module is called."""
        place = self.session.names.find(module)
        if place is None or place[0] in self._told:
            return
        root, prefix = place
        self._told.add(root)
        self._note_packed(module, root)
        for name, fact in (*_configurations(module, root), *shard_units(module, root)):
            fqn = ".".join(part for part in (prefix, name) if part)
            self.session.emit(fact, fqn=fqn)

    def _note_packed(self, module: nn.Module, root: int) -> None:
        """Notes packed weights that no parameter holds as if one did."""
        for child in modules_in(module):
            fqn = (self.session.names.find(child) or (root, ""))[1]
            for name, weight, state in packed_attributes(child):
                self.session.writer.write(
                    ParameterNote(
                        n=self.session.writer.next_n(),
                        root=root,
                        name=f"{fqn}.{name}",
                        dtype=dtype_name(weight),
                        shape=list(weight.shape),
                        owner=type(child).__name__,
                        quant=quantization_of(weight, child, state),
                    )
                )


def _configurations(module: nn.Module, root: int) -> Iterator[tuple[str, ModelConfig]]:
    for name, child in named_modules(module):
        kept = _kept_in_float32(child)
        dtype = _configured_dtype(child) if not name or kept else None
        if kept or dtype:
            yield name, ModelConfig(root=root, dtype=dtype, keep_in_fp32=kept)


def _kept_in_float32(module: nn.Module) -> list[str]:
    return sorted({str(entry) for attribute in _KEEP_LISTS for entry in attribute_of(module, attribute) or ()})


def _configured_dtype(module: nn.Module) -> str | None:
    config = attribute_of(module, "config")
    name = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # reading the old name prints a warning
    dtype = getattr(config, name, None)
    return str(dtype).removeprefix("torch.") if isinstance(dtype, (str, torch.dtype)) else None
