"""FSDP2 as a scenario asks for it, also of models in which ``keep-float32`` keeps modules.

The parameters of a unit have one dtype and one policy, so kept modules among others that are not kept become units of their own, whose parameters
are float32. FSDP2's hooks (they gather, cast and register) run outside of the kept frame that calls a unit, and what inputs and parameters
stand for outlasts them.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import parameters_of
from dtypedoctor.corrections.contract import Counters
from dtypedoctor.corrections.float32_frames import HALF, PAUSE, inside, mapped, narrow, nominal, paused, set_nominal
from dtypedoctor.instrument.places import residual_blocks
from dtypedoctor.scenario.model import Distributed


@dataclass(slots=True, kw_only=True)
class Unit:
    """What one call of ``fully_shard`` gets.

    Attributes:
        modules: one module; of a unit that is there for a correction alone maybe several, which share parameters.
        wide: whether its parameters are kept in float32.
        usual: whether it is a unit without corrections, too.
    """

    modules: list[nn.Module]
    wide: bool
    usual: bool

    def shares_with(self, other: "Unit") -> bool:
        """Whether both hold a parameter, and so have to be one unit."""
        return not (self.usual or other.usual) and bool(_parameter_ids(self.modules) & _parameter_ids(other.modules))


def shard(model: nn.Module, spec: Distributed, kept: Sequence[nn.Module] = ()) -> None:
    """Shards ``model``: a unit for each layer, those that kept modules need, and one for the rest.

    Args:
        model: its corrections are installed.
        spec: names the dtypes in which units compute, reduce and return.
        kept: the modules whose own parameters and arithmetic are kept in float32.
    """
    from torch.distributed import fsdp

    names = (spec.param_dtype, spec.reduce_dtype, spec.output_dtype)
    param, reduce, output = (getattr(torch, name) if name is not None else None for name in names)
    wide = _held_by_none_but(kept, model)
    notes = {module: _stood_for(module, wide, param) for module in kept}
    kept_ids = {id(module) for module in kept}
    for unit in units(model, set(wide)):
        is_kept = id(unit.modules[0]) in kept_ids
        policy = fsdp.MixedPrecisionPolicy(
            param_dtype=None if unit.wide else param,
            reduce_dtype=None if unit.wide else reduce,
            output_dtype=output if unit.usual else None,
            cast_forward_inputs=unit.usual and not is_kept,
        )
        whole: Any = unit.modules if len(unit.modules) > 1 else unit.modules[0]
        fsdp.fully_shard(whole, mp_policy=policy)
        for module in unit.modules if kept else ():
            _Border(is_kept=is_kept, cast=param if unit.usual else None).put_around(module)
    for module, dtypes in notes.items():
        module.register_forward_pre_hook(_Noting(dtypes))
    for parameter in wide.values():  # what the correction would put back is sharded now
        parameter.data = parameter.data.new_empty(0)


def _held_by_none_but(kept: Sequence[nn.Module], model: nn.Module) -> dict[int, nn.Parameter]:
    """The parameters that no module holds but kept ones, by identity: a tied weight that another one holds stays as it is."""
    kept_ids = {id(module) for module in kept}
    others = _parameter_ids([module for module in model.modules() if id(module) not in kept_ids], recurse=False)
    return {id(p): p for module in kept for p in module.parameters(recurse=False) if id(p) not in others}


def _stood_for(module: nn.Module, wide: Collection[int], param: torch.dtype | None) -> dict[str, torch.dtype]:
    """The dtypes that the wide parameters of a module stand for, by name: those from before, or in which its unit would compute."""
    own = {name: p for name, p in parameters_of(module).items() if p is not None and id(p) in wide}
    found = {name: param or nominal(p) for name, p in own.items()}
    return {name: dtype for name, dtype in found.items() if dtype in HALF}


def units(model: nn.Module, wide: Collection[int]) -> list[Unit]:
    """The units of ``model``, those inside others first.

    Args:
        model: not sharded yet.
        wide: identities of the parameters that are kept in float32.
    """
    usual = (residual_blocks(model) - {id(model)}) | {id(model)}
    found: list[Unit] = []
    seen: set[int] = set()

    def left_by(module: nn.Module) -> set[bool]:
        """Makes the units in a module; of which width the parameters are that no unit holds then."""
        seen.add(id(module))
        own = {id(p) in wide for p in module.parameters(recurse=False)}
        parts = [(part, left_by(part)) for part in _parts(module) if id(part) not in seen]
        left = own.union(*(widths for _, widths in parts))
        if len(left) > 1:
            rest = own == {True}
            found.extend(Unit(modules=[p], wide=not rest, usual=False) for p, widths in parts if widths == {not rest})
            left = {rest}
        if id(module) in usual:
            found.append(Unit(modules=[module], wide=left == {True}, usual=True))
            return set()
        return left

    left_by(model)
    return list(_joined(found))


def _joined(found: Sequence[Unit]) -> Iterator[Unit]:
    """The units; those that share parameters are one, in the place of the last of them."""
    for position, unit in enumerate(found):
        later = next((other for other in found[position + 1 :] if unit.shares_with(other)), None)
        if later is None:
            yield unit
        else:
            later.modules[:0] = unit.modules


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that can be units directly in this one: containers that are never called stand for what is in them."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) and type(child).forward is nn.Module.forward:
            yield from _parts(child)
        else:
            yield child


def _parameter_ids(modules: Sequence[nn.Module], *, recurse: bool = True) -> set[int]:
    return {id(p) for module in modules for p in module.parameters(recurse)}


class _Border:
    """Runs FSDP2's hooks of one module outside of the kept frame that calls it.

    What its inputs stand for is carried over these hooks, which make new tensors of them, or if it is not kept rounded before they cast them.

    Args:
        is_kept: whether the module's own arithmetic is kept in float32.
        cast: the dtype to which its inputs would be cast without corrections; None where they would stay.
    """

    def __init__(self, *, is_kept: bool, cast: torch.dtype | None) -> None:
        self._is_kept = is_kept
        self._cast = cast if cast in HALF else None
        self._stood_for: list[torch.dtype] = []
        self._counters = Counters(paused=True)

    def put_around(self, module: nn.Module) -> None:
        """Registers it before and after the hooks that are there."""
        module.register_forward_pre_hook(self._before_inputs, prepend=True, with_kwargs=True)
        module.register_forward_pre_hook(self._after_inputs, with_kwargs=True)
        module.register_forward_hook(lambda *_: PAUSE.begin(), prepend=True)
        module.register_forward_hook(lambda *_: PAUSE.end())

    def _before_inputs(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        PAUSE.begin()
        if not self._is_kept:
            return mapped((args, kwargs), lambda tensor: narrow(tensor, self._counters))
        self._stood_for = [nominal(tensor) for tensor in inside((args, kwargs))]
        return None

    def _after_inputs(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        given = mapped((args, kwargs), self._noted) if self._is_kept else (args, kwargs)
        PAUSE.end()
        return given

    def _noted(self, tensor: Tensor) -> Tensor:
        """An input with what it stood for before the hooks, or in what it would be computed."""
        dtype = self._stood_for.pop(0)
        if tensor.dtype is not torch.float32:
            return tensor
        wanted = dtype if dtype in HALF else self._cast
        return set_nominal(tensor.view_as(tensor), wanted) if wanted is not None else tensor


class _Noting:
    """Notes on the parameters of a module, which FSDP2 has just gathered, what they stand for.

    Args:
        dtypes: by name of the parameter.
    """

    def __init__(self, dtypes: dict[str, torch.dtype]) -> None:
        self._dtypes = dtypes

    def __call__(self, module: nn.Module, _: Any) -> None:
        held = dict(module.named_parameters(recurse=False))
        with paused():
            for name, dtype in self._dtypes.items():
                set_nominal(held[name], dtype)
