"""What models say about their own dtypes: configurations, lists of modules to keep in float32, shard units; and where training takes their parameters."""

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtypedoctor._torch_private import SHARDING_COPIES, unit_policy
from dtypedoctor.instrument.frames import source_of
from dtypedoctor.instrument.module_tree import attribute_of, modules_in, named_modules, named_tensors
from dtypedoctor.instrument.naming import dtype_name, quantization_of, short_name
from dtypedoctor.instrument.operators import uncollected
from dtypedoctor.instrument.packed_weights import packed_attributes
from dtypedoctor.instrument.readable import held_values
from dtypedoctor.instrument.silent.observer import Observer, named_parameters_of
from dtypedoctor.instrument.statistics import measurable, out_of_their_sight
from dtypedoctor.trace.events import ParameterNote
from dtypedoctor.trace.records.execution import ModelConfig, ParameterEnds, ShardCall, ShardUnit

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
        note = self.session.guard.shield(self._note, "some calls of fully_shard")

        @functools.wraps(original)
        def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
            note(module, "fully_shard", kwargs)
            return original(module, *args, **kwargs)

        for name in (SHARDING, *SHARDING_COPIES):
            owner = sys.modules.get(name)
            if getattr(owner, "fully_shard", None) is original:
                self.replace(owner, "fully_shard", fully_shard)
        first = sharding.FullyShardedDataParallel
        self.replace(first, "__init__", self._around_first(first.__init__))

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
        kept = sorted({str(entry) for attribute in _KEEP_LISTS for entry in attribute_of(child, attribute) or ()})
        dtype = _configured_dtype(child) if not name or kept else None
        if kept or dtype:
            yield name, ModelConfig(root=root, dtype=dtype, keep_in_fp32=kept)


def _configured_dtype(module: nn.Module) -> str | None:
    config = attribute_of(module, "config")
    name = "dtype" if hasattr(config, "dtype") else "torch_dtype"  # reading the old name prints a warning
    dtype = getattr(config, name, None)
    return str(dtype).removeprefix("torch.") if isinstance(dtype, (str, torch.dtype)) else None


SAMPLED = 64
"""Elements of a parameter that are followed."""
MOST_PARAMETERS = 512
"""Parameters of an optimizer that are followed, spread over all that it has."""
MOST_OPTIMIZERS = 16


@dataclass(slots=True)
class _Journey:
    """The followed elements of an optimizer's parameters before its first step and after its last, or the last that was a power of two."""

    names: list[str]
    dtypes: list[str]
    starts: list[Tensor]
    ends: list[Tensor]
    states: list[str]
    steps: int = 0
    """Steps taken; ``ended`` of them when ``ends`` were copied."""
    ended: int = 0


class ParameterJourneys(Observer):
    """Copies a few elements of each trained parameter before the first step, and writes a :class:`ParameterEnds` of how far they have moved at the end.

    They are copied after steps 1, 2, 4, 8 … as well, since an optimizer may be gone when the program ends. Nothing is read from a device before the end.
    """

    between_looks: ClassVar[bool] = True

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._journeys: list[_Journey] = []
        self._alive: WeakKeyDictionary[Optimizer, tuple[_Journey, Sequence[Tensor]]] = WeakKeyDictionary()

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to take a step."""
        if optimizer in self._alive or len(self._journeys) == MOST_OPTIMIZERS:
            return
        named = [pair for pair in named_parameters_of(optimizer, self.names) if _is_trained(pair[1])]
        named = named[:: -(-len(named) // MOST_PARAMETERS) or 1]
        parameters = [parameter for _, parameter in named]
        names, dtypes = [name for name, _ in named], list(map(dtype_name, parameters))
        journey = _Journey(names, dtypes, _copies(parameters), [], [""] * len(names))
        self._journeys.append(journey)
        self._alive[optimizer] = journey, parameters

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer has taken a step."""
        if optimizer not in self._alive:
            return
        journey, parameters = self._alive[optimizer]
        journey.steps += 1
        if journey.steps & (journey.steps - 1) == 0:
            journey.ends, journey.ended = _copies(parameters), journey.steps
            journey.states = [_dtypes_kept(optimizer, parameter) for parameter in parameters]

    def stop(self) -> None:
        """The program is over: tells of each optimizer that has taken a step."""
        for journey, parameters in self._alive.values():
            if journey.steps:
                journey.ends, journey.ended = _copies(parameters), journey.steps
        for journey in self._journeys:
            if journey.ended:
                self.session.emit(_ends_of(journey), phase="optimizer")
        self._journeys.clear()


def _is_trained(parameter: Tensor) -> bool:
    return parameter.requires_grad and parameter.is_floating_point() and held_values(parameter) is not None


def _copies(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Some elements of each parameter as float32; none of one that cannot be read now."""
    copies: list[Tensor] = []
    with out_of_their_sight():
        for parameter in parameters:
            values = parameter if measurable(parameter) else held_values(parameter)
            # FSDP2 frees the storage of a unit's parameters between calls and leaves their sizes as they were
            freed = values is None or not measurable(values) or not values.untyped_storage().nbytes()
            if values is None or freed or not values.is_contiguous():
                copies.append(torch.empty(0))
                continue
            flat = values.detach().view(-1)
            copies.append(flat[:: -(-flat.numel() // SAMPLED) or 1].to(torch.float32, copy=True))
    uncollected(copies)
    return copies


def _dtypes_kept(optimizer: Optimizer, parameter: Tensor) -> str:
    """Dtypes of what an optimizer keeps for each element of a parameter."""
    kept = optimizer.state.get(parameter, {}) if isinstance(optimizer.state, dict) else {}
    tensors = [value for value in kept.values() if isinstance(value, Tensor) and value.numel() == parameter.numel() > 1]
    return ", ".join(sorted(set(map(dtype_name, tensors))))


def _ends_of(journey: _Journey) -> ParameterEnds:
    """The record of a journey, without parameters that could not be read or are not finite."""
    record = ParameterEnds(steps=journey.ended, names=[], dtypes=[], sampled=[], moved=[], distance=[], norm=[])
    rows = zip(journey.names, journey.dtypes, journey.states, journey.starts, journey.ends, strict=True)
    for name, dtype, state, start, end in rows:
        if not start.numel() or start.shape != end.shape:
            continue
        before, now = start.double().cpu(), end.double().cpu()
        distance, norm = float((now - before).norm()), float(now.norm())
        if math.isfinite(distance) and math.isfinite(norm):
            record.names.append(name)
            record.dtypes.append(dtype)
            record.states.append(state)
            record.sampled.append(now.numel())
            record.moved.append(int((now != before).sum()))
            record.distance.append(float(f"{distance:.4g}"))
            record.norm.append(float(f"{norm:.4g}"))
    return record
