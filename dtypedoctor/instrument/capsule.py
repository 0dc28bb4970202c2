"""Reduces a call that fails to a capsule: the smallest input and weights that still fail.

Everything is decided by making it again: whether it fails by itself, which rows of its inputs matter, and whether made-up inputs fail as well.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from dtypedoctor.instrument.capture import Operator, Tensors, describe, recipe
from dtypedoctor.instrument.live_call import LiveCall, Repeat, copied, tensors_of
from dtypedoctor.instrument.module_tree import mapped
from dtypedoctor.instrument.operators import OperatorMode
from dtypedoctor.instrument.operators import tensors_of as operands_of
from dtypedoctor.instrument.sources import Sources
from dtypedoctor.instrument.statistics import is_finite, measurable, real_of
from dtypedoctor.interruptions import contained
from dtypedoctor.trace.events import OFFLOADED
from dtypedoctor.unpatched import perf_counter

__all__ = ["Kind", "capsule_of", "in_dtype", "on_copies", "operator_capsule"]

FORMAT = 1
MOST_REPEATS = 400
"""Calls that are made to reduce one."""
MOST_REPEATS_OF_OPERATOR = 40
"""Calls that are made to reduce an operator, in the program itself."""
LONGEST_OF_OPERATOR = 0.5
"""Seconds that go into reducing an operator."""
LONGEST = 10.0
"""Seconds that go into reducing one."""
SEEDS = 4
"""Synthetic inputs that are drawn before the recorded ones are kept."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes that an experiment in float32 replaces; float8 stays, which operators ask for."""
_NUMBER = re.compile(r"\d+")


class Kind(StrEnum):
    """How a call fails."""

    RAISED = "raised"
    NONFINITE = "nonfinite"
    """Finite inputs, and an output that is not."""
    SILENT = "silent"
    """Nothing that it returns shows it, so the call is kept as it is."""
    BACKWARD = "backward"
    """Finite gradients come back to its outputs, and what leaves it backwards is not finite."""


def signature(error: BaseException | None) -> str:
    """An exception by its class and message, whatever sizes it names."""
    return "" if error is None else _NUMBER.sub("N", f"{type(error).__name__}: {error}")


def operator_capsule(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], error: BaseException | None, limit: int
) -> tuple[dict[str, Any], bytes] | None:
    """The capsule of one operator that raises ``error``, or makes something that is not finite of finite operands; None where it does not again.

    Raises:
        TypeError: an argument cannot be described.
    """
    call = LiveCall.entered(Operator(str(func)), "", args, kwargs)
    kind = Kind.NONFINITE if error is None else Kind.RAISED
    until = perf_counter() + LONGEST_OF_OPERATOR
    failing = Failing(kind=kind, error=signature(error), left=MOST_REPEATS_OF_OPERATOR, until=until)
    if not failing.shows(call):
        return None
    return capsule_of(call, failing, limit)


class Origin(OperatorMode):
    """Notes the first operator that makes NaN or inf of operands in which there is none.

    Attributes:
        name: its name; empty where there is none.
    """

    def __init__(self) -> None:
        super().__init__()
        self.name = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Runs ``func`` as it is."""
        given_is_finite = not self.name and not any(map(_overflows, operands_of((args, kwargs or {}))))
        result = func(*args, **(kwargs or {}))
        if given_is_finite and any(map(_overflows, operands_of(result))):
            self.name = str(func)
        return result


def _overflows(tensor: Tensor) -> bool:
    """Whether there is NaN or inf in a tensor; -inf is what masks are made of."""
    if tensor.device.type != "cpu" or tensor.element_size() == 1 or not measurable(tensor):
        return False
    return not bool((tensor.detach() < torch.inf).all())


@dataclass(slots=True, kw_only=True)
class Failing:
    """Whether a call fails as the one that was caught.

    Attributes:
        kind: how that fails.
        error: signature of what it raised.
        left: how often a call may still be made.
        until: the time, of ``perf_counter``, from which on none is made any more: what is known by then is kept.
        drew: the last call drew random numbers.
    """

    kind: Kind
    error: str = ""
    left: int = MOST_REPEATS
    until: float = field(default_factory=lambda: perf_counter() + LONGEST)
    drew: bool = False
    last: Repeat = field(default_factory=Repeat)
    began: str = ""
    """The operator that first made something that is not finite in the last call."""
    may_be_given: bool = False
    """Whether inputs that are not finite are what failed."""
    origin: str = ""
    """The operator that first makes something that is not finite; empty for any."""
    passes_in_float32: bool = False
    """Whether a call that raises must pass in float32: what was cut out of its inputs is not to make it invalid."""

    def shows(self, call: LiveCall) -> bool:
        """Makes ``call`` again, on copies of its arguments."""
        if self.left <= 0 or perf_counter() > self.until:
            return False
        # With a parameter that is not finite the call shows what an earlier step has done.
        if self.kind in (Kind.NONFINITE, Kind.BACKWARD) and not all(is_finite(one) for _, one in call.parameters()):
            return False
        if self.kind is Kind.NONFINITE and not self.may_be_given and _is_given_nonfinite(call):
            return False
        self.left -= 1
        with Origin() as origin:
            repeat = on_copies(call)
        self.last, self.drew, self.began = repeat, repeat.drew, origin.name
        if self.kind is Kind.RAISED:
            return signature(repeat.error) == self.error and not (self.passes_in_float32 and in_float32(call).error)
        if repeat.error is not None:
            return False
        if self.kind is Kind.SILENT:
            return True
        if self.kind is Kind.NONFINITE:
            return not all(map(is_finite, tensors_of(repeat.output))) and self.origin in ("", origin.name)
        upstream_is_finite = all(map(is_finite, repeat.upstream.values()))
        return upstream_is_finite and not all(map(is_finite, repeat.gradients.values()))


def _is_given_nonfinite(call: LiveCall) -> bool:
    """Whether an input is NaN or inf; -inf is what masks are made of."""
    floats = (real_of(t).detach() for _, t in call.inputs() if t.is_floating_point() or t.is_complex())
    return any(bool((tensor.isnan() | (tensor == torch.inf)).any()) for tensor in floats)


def on_copies(call: LiveCall) -> Repeat:
    """What a call does when it is made again on copies of its arguments; never raises."""
    memo: dict[int, Any] = {}
    repeat = Repeat()
    with contained() as ours:
        repeat = call.again(args=copied(call.args, memo), kwargs=copied(call.kwargs, memo))
    return repeat if ours.error is None else Repeat(error=ours.error)


@contextmanager
def in_dtype(call: LiveCall, to: torch.dtype, of: Collection[torch.dtype]) -> Iterator[LiveCall]:
    """Inside, the call that it gives has weights, buffers and inputs of the dtypes ``of`` in another one; afterwards the module is as it was."""
    held = {id(tensor): tensor for _, tensor in (*call.parameters(), *call.buffers()) if tensor.dtype in of}
    before = [(tensor, tensor.data) for tensor in held.values()]

    def cast(tensor: Tensor) -> Tensor:
        dtype = to if tensor.dtype in of else tensor.dtype
        return tensor.detach().to(dtype).requires_grad_(tensor.requires_grad)

    memo: dict[int, Any] = {}
    args, kwargs = mapped(call.args, cast, memo), mapped(call.kwargs, cast, memo)
    try:
        for tensor, data in before:
            tensor.data = data.to(to)
        yield replace(call, args=args, kwargs=kwargs)
    finally:
        for tensor, data in before:
            tensor.data = data


def in_float32(call: LiveCall) -> Repeat:
    """What a call does with weights, buffers and inputs in float32 and without autocast."""
    with in_dtype(replace(call, autocast=(), gradients={}), torch.float32, FLOATS) as wide:
        return on_copies(wide)


def relative_error(call: LiveCall) -> float | None:
    """The largest relative error of what a call returns against float32; None where float32 cannot tell."""
    repeat, exact = on_copies(call), in_float32(call)
    if repeat.error is not None or exact.error is not None:
        return None
    pairs = zip(tensors_of(repeat.output), tensors_of(exact.output), strict=False)
    errors = [
        float((tensor.float() - reference).norm() / reference.norm().clamp_min(1e-30))
        for tensor, reference in pairs
        if tensor.is_floating_point() and tensor.shape == reference.shape
    ]
    return max(filter(isfinite, errors), default=None)


def capsule_of(call: LiveCall, failing: Failing, limit: int) -> tuple[dict[str, Any], bytes]:
    """The description and the tensors of ``call``, which fails; where they take more than ``limit`` bytes, why there is no capsule, and nothing.

    Raises:
        TypeError: the module's class, or an argument, can neither be imported nor be described.
    """
    weights = (*call.parameters(), *call.buffers())
    elsewhere = next((name.removeprefix("weight.") for name, tensor in weights if tensor.is_meta), "")
    if elsewhere:
        name = f"{call.fqn}.{elsewhere}".lstrip(".")
        return {"why": OFFLOADED.format(name=name) + "; run the script without the offload to have one"}, b""
    failing.shows(call)
    drew = failing.drew
    if failing.kind is Kind.NONFINITE:
        failing.origin = failing.began
    call = replace(call, gradients=failing.last.upstream)
    cut: list[str] = []
    synthetic = False
    error = None
    if failing.kind is Kind.RAISED and not isinstance(call.module, Operator):
        failing.passes_in_float32 = in_float32(call).error is None
    if failing.kind is Kind.SILENT:
        error = relative_error(call)
    if failing.kind is not Kind.SILENT:
        call, cut = _cut(call, failing)
        call, synthetic = _with_synthetic_inputs(call, failing)
    sources, tensors = Sources(), Tensors()
    described = _described(call, tensors, sources)
    if drew and call.random is not None:
        tensors.keep("random", call.random.cpu)
    drawn = _drawn_weights(call, tensors, failing, limit)
    held = {name: tensor for name, tensor in tensors.named().items() if name not in drawn}
    size = sum(tensor.numel() * tensor.element_size() for tensor in held.values())
    if size > limit:
        return {"why": f"it takes {size:,} bytes and --capsule-limit allows {limit:,}"}, b""
    recorded = [] if synthetic else [name for name, tensor in call.inputs() if tensor.numel() > 1]
    description = {
        "capsule": FORMAT,
        "fqn": call.fqn,
        "class": call.module.operator if isinstance(call.module, Operator) else type(call.module).__name__,
        "kind": str(failing.kind),
        "error": failing.error,
        "origin": failing.origin,
        "given": failing.may_be_given and _is_given_nonfinite(call),
        "relative_error": error,
        "finding": {},
        "call": described,
        "requires_grad": [name for name, tensor in (*call.inputs(), *call.parameters()) if tensor.requires_grad],
        "random": drew,
        "drawn": drawn,
        "cut": cut,
        "data": {"synthetic": synthetic, "recorded": recorded},
        "classes": sources.classes,
        "source": sources.text,
    }
    from safetensors.torch import save  # which a run that does not fail never needs

    return description, save(held)


def _described(call: LiveCall, tensors: Tensors, sources: Sources) -> dict[str, Any]:
    """The call in the form that :mod:`dtypedoctor.instrument.capture` gives it."""
    name_of = sources.name_of
    gradients = {str(index): tensors.keep(f"gradient.0.{index}", tensor) for index, tensor in call.gradients.items()}
    described = {
        "recipe": recipe(call.module, tensors, name_of=name_of),
        "args": [describe(value, tensors, f"input.{i}", name_of) for i, value in enumerate(call.args)],
        "kwargs": {name: describe(value, tensors, f"input.{name}", name_of) for name, value in call.kwargs.items()},
    }
    # Globals and attributes of classes that the carried text uses and does not make, described; what cannot be described is left out
    found: dict[str, Any] = {}
    while left := [name for name in sources.state if name not in found]:  # one may name classes with state of their own
        for name in left:
            key = f"state/{name}".replace(".", "/")
            found[name] = describe(sources.state[name], tensors, key, sources.name_of)
    return {
        **described,
        "state": {name: value for name, value in found.items() if not _has_opaque(value)},
        "training": call.training,
        "default_dtype": str(call.settings.default_dtype).removeprefix("torch."),
        "grad": call.grad,
        "autocast": [[state.device, str(state.dtype).removeprefix("torch.")] for state in call.autocast],
        "leaving": [{"what": "the output", "gradients": gradients}] if gradients else [],
    }


def _has_opaque(described: Any) -> bool:
    """Whether something in a described value cannot be made again."""
    if isinstance(described, dict):
        return "opaque" in described or any(map(_has_opaque, described.values()))
    return isinstance(described, list) and any(map(_has_opaque, described))


def _cut(call: LiveCall, failing: Failing) -> tuple[LiveCall, list[str]]:
    """The call with as few rows as still fail, along the first two dimensions of its first input; what was cut, in words."""
    said = []
    first = next((tensor for _, tensor in call.inputs() if tensor.dim()), None)
    sizes = [] if first is None else list(dict.fromkeys(first.shape[: max(1, first.dim() - 1)][:2]))
    for size in sizes:
        kept = size
        while kept > 1 and (smaller := _halved(call, kept, failing)) is not None:
            call, kept = smaller, (kept + 1) // 2
        if kept < size:
            said.append(f"{kept} of {size}")
    return call, said


def _halved(call: LiveCall, size: int, failing: Failing) -> LiveCall | None:
    """The call with one half of every dimension of ``size``, if one of the halves fails."""
    half = (size + 1) // 2
    for begin in (0, size - half):
        smaller = _with_tensors(call, partial(_narrowed, size=size, begin=begin, length=half))
        if failing.shows(smaller):
            return smaller
    return None


def _narrowed(tensor: Tensor, size: int, begin: int, length: int) -> Tensor:
    for dim in range(max(1, tensor.dim() - 1) if tensor.is_floating_point() else tensor.dim()):
        if tensor.dim() and tensor.shape[dim] == size:
            tensor = tensor.narrow(dim, begin, length)
    return tensor


def _with_tensors(call: LiveCall, function: Callable[[Tensor], Tensor]) -> LiveCall:
    """The call with ``function`` applied to its inputs and to the gradients that come back to its outputs."""

    def leaf(tensor: Tensor) -> Tensor:
        return function(tensor.detach()).clone().requires_grad_(tensor.requires_grad)

    memo: dict[int, Any] = {}
    args, kwargs = mapped(call.args, leaf, memo), mapped(call.kwargs, leaf, memo)
    gradients = {index: leaf(tensor) for index, tensor in call.gradients.items()}
    return replace(call, args=args, kwargs=kwargs, gradients=gradients)


def _with_synthetic_inputs(call: LiveCall, failing: Failing) -> tuple[LiveCall, bool]:
    """The call with made-up inputs of the same magnitudes that fail as well, and True; else as it is, and False."""
    for seed in range(SEEDS):
        for draw in _DRAWS:
            generator = torch.Generator().manual_seed(seed)
            made = _with_tensors(call, partial(_synthetic, draw=draw, generator=generator))
            if failing.shows(made):
                return made, True
    return call, False


Draw = Callable[[Tensor, torch.Generator], Tensor]


def _normal(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Normal values with the root mean square of ``tensor``, no larger than its largest."""
    wide = tensor.float().cpu()
    scale = wide.square().mean().sqrt()
    drawn = torch.randn(tensor.shape, generator=generator) * scale
    return drawn.clamp(-wide.abs().max(), wide.abs().max())


def _signed(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """The largest magnitude of ``tensor`` everywhere, with random signs."""
    signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
    return signs * tensor.float().cpu().abs().max()


def _channels(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """The largest magnitude of each channel (last dimension), with the sign of its mean."""
    wide = tensor.float().cpu().reshape(-1, tensor.shape[-1])
    row = wide.abs().amax(0) * torch.where(wide.mean(0) < 0, -1.0, 1.0)
    return row.expand(tensor.shape)


_DRAWS: tuple[Draw, ...] = (_normal, _signed, _channels)


def _synthetic(tensor: Tensor, draw: Draw, generator: torch.Generator) -> Tensor:
    """A tensor of the same shape and dtype that holds no data; masks, which are boolean or hold inf, and scalars stay what they are."""
    if tensor.numel() <= 1 or tensor.dtype is torch.bool:
        return tensor
    if tensor.is_floating_point():
        plain = bool(tensor.isfinite().all())
        return draw(tensor, generator).to(tensor) if plain and tensor.dtype.itemsize > 1 else tensor
    if tensor.is_complex() or int(tensor.min()) < 0 or int(tensor.max()) <= 1:
        return tensor
    return torch.randint(0, int(tensor.max()) + 1, tensor.shape, generator=generator).to(tensor)


def _drawn_weights(call: LiveCall, tensors: Tensors, failing: Failing, limit: int) -> dict[str, Any]:
    """Weights that are left out because the limit does not allow them and random ones fail as well: how to draw each."""
    sizes = {name: t.numel() * t.element_size() for name, t in tensors.named().items()}
    if sum(sizes.values()) <= limit:
        return {}
    drawn: dict[str, Any] = {}
    if failing.kind is Kind.SILENT:
        return drawn
    weights = {
        name: parameter for name, parameter in call.parameters() if name in sizes and parameter.is_floating_point()
    }
    for name in sorted(weights, key=lambda name: -sizes[name]):
        weight = weights[name].data
        how = {"shape": list(weight.shape), "dtype": str(weight.dtype).removeprefix("torch."),
               "scale": float(weight.float().square().mean().sqrt()), "seed": len(drawn)}  # fmt: skip
        kept = weight.clone()
        weight.copy_(drawn_weight(how))
        if failing.shows(call):
            drawn[name] = how
        else:
            weight.copy_(kept)
        if sum(size for other, size in sizes.items() if other not in drawn) <= limit:
            break
    return drawn


def drawn_weight(how: dict[str, Any]) -> Tensor:
    """The random weight that a description asks for, on the CPU."""
    generator = torch.Generator().manual_seed(how["seed"])
    values = torch.randn(how["shape"], generator=generator) * how["scale"]
    return values.to(getattr(torch, how["dtype"]))
