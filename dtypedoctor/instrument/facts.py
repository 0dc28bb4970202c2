"""What models say about their own dtypes: configurations, lists of modules to keep in float32, shard units, packed weights."""

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import SHARDING_COPIES, unit_policy, without_autocast
from dtypedoctor.instrument.frames import source_of
from dtypedoctor.instrument.module_tree import attribute_of, modules_in, named_modules, named_tensors
from dtypedoctor.instrument.naming import Names, dtype_name, quantization_of, short_name
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.events import ParameterNote
from dtypedoctor.trace.records.models import ModelConfig, PackedBits, PackedWeight, ShardCall, ShardUnit

SHARDING = "torch.distributed.fsdp"
"""The module that holds both generations of FSDP; it is not imported for this."""

_POLICY = ("param_dtype", "reduce_dtype", "output_dtype")


class ShardCalls:
    """Follows the calls that make shard units, once :data:`SHARDING` has been imported: what FSDP shards together, noted before it is asked to.

    Writes a :class:`ShardCall` before each ``fully_shard``, and where FSDP1 refuses a unit.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
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
        note = self._session.guard.shield(self._note, "some calls of fully_shard")

        @functools.wraps(original)
        def fully_shard(module: Any, *args: Any, **kwargs: Any) -> Any:
            note(module, "fully_shard", kwargs)
            return original(module, *args, **kwargs)

        return fully_shard

    def _around_first(self, original: Callable[..., Any]) -> Callable[..., Any]:
        note = self._session.guard.shield(self._note, "what FSDP1 refused")

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
        self._session.emit(called)


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


MAX_CHECKS = 400
"""Comparisons in one window."""
MAX_BLOCKS = 512
"""Blocks of a packed weight, of 64 elements mostly, that are decoded and compared."""

_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.addmm_.", "aten.bmm.", "aten.baddbmm.", "aten.matmul.", "aten.linear.")
_READERS = (
    *_PRODUCTS,
    "aten._to_copy.",
    "aten.to.",
    "aten.type_as.",
    "aten.copy_.",
    "aten.cat.",
    "aten.mul.",
    "aten.mul_.",
)
"""Ops after which it is too late to see which bits their operand held: what a cast to float16 makes of 1e-16 is 0."""

SAME = 0.1
"""Relative error below which bits are those of the weight; bits of another format give 0.7 and more."""


@dataclass(slots=True)
class _Packed:
    """A packed weight; ``owner`` is the dotted name of the module that holds it."""

    root: int
    owner: str
    name: str
    weight: Tensor
    state: Any
    sample: "_Sample | None" = None


class WeightCheck:
    """Compares the matrix that a product really gets with the packed weight that it is meant to be.

    Whoever dequantized it (bitsandbytes, a Triton or C kernel, hand-written code) and however: the product's operand has the
    shape of the quantization state, and the packed bytes say what should be in it. They are decoded here, blocks from all over
    the matrix, so that neither the time nor the memory that a comparison takes grows with the model.

    A :class:`PackedWeight` is written for each operand of a product, a :class:`PackedBits` for one that holds the bits of a weight in
    another format than its dtype says.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._packed: list[_Packed] = []
        self._left = MAX_CHECKS

    def look_at(self, names: Names) -> None:
        """Finds the packed weights of all known modules."""
        known = {id(packed.state) for packed in self._packed}
        self._packed += [packed for packed in _packed_weights(names) if id(packed.state) not in known]

    def check(self, n: int, op: str, operands: list[Tensor], root: int, fqn: str) -> None:
        """Compares the operands of op ``n``, which runs in module ``fqn``."""
        if not self._packed or not op.startswith(_READERS):
            return
        for index, operand in enumerate(operands):
            if self._left and measurable(operand) and operand.dim() == 2:
                self._compare_bits(n, index, operand.detach(), root, fqn)
                if op.startswith(_PRODUCTS):
                    self._compare(n, index, operand.detach(), root, fqn)

    def _fitting(self, operand: Tensor, root: int, fqn: str) -> list[_Packed]:
        return [p for p in self._packed if p.root == root and _is_near(p.owner, fqn) and _fits(operand, p.state)]

    def _compare_bits(self, n: int, index: int, operand: Tensor, root: int, fqn: str) -> None:
        for packed in self._fitting(operand, root, fqn):
            stored = packed.state.dtype
            if stored == operand.dtype or stored.itemsize != operand.dtype.itemsize:
                continue
            self._left -= 1
            if _relative_error(operand.view(stored), packed) < SAME:
                error = _relative_error(operand, packed)
                bits = PackedBits(
                    of=n,
                    operand=index,
                    weight=packed.name,
                    dtype=dtype_name(operand),
                    quant_dtype=short_name(stored),
                    relative_error=error if isfinite(error) else None,
                )
                self._session.emit(bits, fqn=packed.owner)

    def _compare(self, n: int, index: int, operand: Tensor, root: int, fqn: str) -> None:
        fitting = self._fitting(operand, root, fqn)
        if not fitting:
            return
        self._left -= 1
        errors = [(_relative_error(operand, packed), packed) for packed in fitting]
        error, closest = min(errors, key=lambda found: found[0])
        compared = PackedWeight(
            of=n,
            operand=index,
            weight=closest.name,
            dtype=dtype_name(operand),
            quant_dtype=short_name(closest.state.dtype),
            relative_error=error if isfinite(error) else None,
        )
        self._session.emit(compared, fqn=closest.owner)


def _packed_weights(names: Names) -> Iterator[_Packed]:
    for root, name, tensor, _, _ in names.tensors():
        state = getattr(tensor, "quant_state", None)
        if state is not None and not getattr(state, "packing_format_for_cpu", False):
            yield _Packed(root=root, owner=name.rpartition(".")[0], name=name, weight=tensor.data, state=state)
    for module in (child for top in names.roots for child in modules_in(top)):
        root, fqn = names.find(module) or (-1, "")
        for name, weight, state in packed_attributes(module):
            yield _Packed(root=root, owner=fqn, name=f"{fqn}.{name}", weight=weight, state=state)


def packed_dtypes(names: Names, root: int) -> set[str]:
    """The dtypes that the quantization states of an outermost module say."""
    return {short_name(packed.state.dtype) for packed in _packed_weights(names) if packed.root == root}


def packed_attributes(module: nn.Module) -> Iterator[tuple[str, Tensor, Any]]:
    """Packed bytes that are a plain attribute of a module beside another that is their state: name, bytes, state."""
    held = vars(module)
    states = [value for value in held.values() if _is_state(value)]
    for name, value in held.items() if states else ():
        if isinstance(value, Tensor) and not value.is_floating_point():
            state = next((s for s in states if value.numel() * 2 == s.shape.numel()), None)
            if state is not None:
                yield name, value, state


def _is_state(value: Any) -> bool:
    return type(value).__name__ == "QuantState" and isinstance(getattr(value, "absmax", None), Tensor)


def _is_near(owner: str, fqn: str) -> bool:
    """Whether code in module ``fqn`` may multiply with the weight of module ``owner``: it is the same, above or inside."""
    return not fqn or owner == fqn or owner.startswith(f"{fqn}.") or fqn.startswith(f"{owner}.")


def _fits(operand: Tensor, state: Any) -> bool:
    shape = tuple(state.shape)
    return tuple(operand.shape) in (shape, shape[::-1]) and operand.device == state.absmax.device


def _relative_error(operand: Tensor, packed: _Packed) -> float:
    """Norm of the difference over the norm of the weight, over the elements that are compared; inf where it is not finite."""
    with torch.no_grad(), without_autocast():
        if packed.sample is None:
            packed.sample = _decoded(packed.weight, packed.state)
        sample, shape = packed.sample, tuple(packed.state.shape)
        size = sample.values.norm().clamp_min(torch.finfo(torch.float32).tiny)
        forms = [form for form in (operand, operand.t()) if tuple(form.shape) == shape]
        errors = [float((sample.of(form).float() - sample.values).norm() / size) for form in forms]
    return min((e if isfinite(e) else float("inf") for e in errors), default=float("inf"))


@dataclass(frozen=True, slots=True)
class _Sample:
    """Some blocks of a packed weight: which (shape [blocks]), and their values in float32 (shape [blocks, elements])."""

    blocks: Tensor
    values: Tensor

    def of(self, dense: Tensor) -> Tensor:
        """The same elements of a matrix that has the shape of the weight."""
        count = self.values.shape[1]
        at = self.blocks[:, None] * count + torch.arange(count, device=dense.device)
        columns = dense.shape[1]
        return dense[at // columns, at % columns]


def _decoded(weight: Tensor, state: Any) -> _Sample:
    """Blocks of a packed weight: two codes of 4 bits in each byte, the first in the upper half, times the block's largest magnitude."""
    numel = prod(state.shape)
    size = min(int(state.blocksize), numel)
    count = numel // size
    blocks = torch.linspace(0, count - 1, min(count, MAX_BLOCKS), device=weight.device).long()
    absmax = state.absmax[blocks]
    if state.nested:
        inner = state.state2
        absmax = inner.code[absmax.long()] * inner.absmax[blocks // inner.blocksize] + state.offset
    at = blocks[:, None] * (size // 2) + torch.arange(size // 2, device=weight.device)
    packed = weight.contiguous().view(torch.uint8).flatten()[at]
    codes = torch.stack((packed >> 4, packed & 15), -1).flatten(1).long()
    return _Sample(blocks, state.code.float()[codes] * absmax.float()[:, None])


_KEEP_LISTS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


class ModelFacts:
    """Writes, when an outermost module is first called, each :class:`ModelConfig` and :class:`ShardUnit` of it and the modules inside it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._told: set[int] = set()

    def tell(self, module: nn.Module) -> None:
        """An outermost module is called."""
        place = self._session.names.find(module)
        if place is None or place[0] in self._told:
            return
        root, prefix = place
        self._told.add(root)
        self._note_packed(module, root)
        for name, fact in (*_configurations(module, root), *shard_units(module, root)):
            fqn = ".".join(part for part in (prefix, name) if part)
            self._session.emit(fact, fqn=fqn)

    def _note_packed(self, module: nn.Module, root: int) -> None:
        """Notes packed weights that no parameter holds as if one did."""
        for child in modules_in(module):
            fqn = (self._session.names.find(child) or (root, ""))[1]
            for name, weight, state in packed_attributes(child):
                self._session.writer.write(
                    ParameterNote(
                        n=self._session.writer.next_n(),
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
