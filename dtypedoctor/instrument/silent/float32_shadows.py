"""Operators that are run beside the real ones in float32: what would have come out, had half precision not been in between?

An overflow may leave nothing non-finite behind, and a router may choose other experts; both results are finite.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dtypedoctor._torch_private import schema_of
from dtypedoctor.instrument.budget import Readings
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.operators import (
    Arguments,
    TensorIds,
    Uncollected,
    bytes_of,
    fits,
    in_wider,
    leaves_memory_as_it_was,
    scalars,
    tensors_of,
    written,
)
from dtypedoctor.instrument.silent.look import Seen
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.statistics import HALF, Extent, is_spread, measurable, measure
from dtypedoctor.instrument.whereabouts import Whereabouts
from dtypedoctor.trace.records.silent import Absorbed, Overflowed, RouterChoice

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

MAX_SHADOWED = 64
"""Ops of one call that are run in float32 beside the real ones; an inf that lives longer is the module watch's business."""
_LARGE_TENSORS = "overflows that end in finite values, in large tensors"
_MADE_ANEW = frozenset(
    {
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "randint_like",
        "new_zeros",
        "new_ones",
        "new_full",
        "zero",
        "fill",
    }
)
_MULTIPLIES = frozenset(
    {
        "mul",
        "div",
        "pow",
        "square",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "exp",
        "exp2",
        "sigmoid",
        "_softmax",
        "prod",
        "cumprod",
        "_to_copy",
        "copy",
    }
)
"""Operators whose result is off by a part of itself in float32, however large their operands are; that of a sum is off by a part of these."""
NOISE = 64.0
"""Roundings of the largest operand that a sum in float32 may be off by."""
MOST_ROUNDED = 1 << 16
"""Elements of an operator's operands and results together, up to which what it rounds to 0 is followed."""
ROUNDED_EACH = 3
"""Calls of an operator at one line whose zeros are followed."""
NARROW = (torch.float16, torch.float8_e5m2)
_FLOATS = (torch.float16, torch.bfloat16, torch.float8_e5m2)


@dataclass(frozen=True, slots=True)
class _Overflow:
    """The op that overflowed, and the ops that its result went through."""

    op: Overflowed
    through: tuple[str, ...] = ()


@dataclass(slots=True)
class _Shadow(Uncollected):
    """What a tensor would hold had nothing overflowed, in float32 (or as it is, for a mask)."""

    tensor: Tensor
    overflow: _Overflow


class AbsorbedOverflows(Observer):
    """Writes an :class:`Absorbed` for each overflow that ends in finite values.

    A square of 300 is inf in float16, its reciprocal root 0, and the norm returns zeros. ``tanh(inf)`` is 1, as it should be. A
    clamp makes 65504 of it. Whether such an overflow did harm is measured: the ops between the inf and the first finite result
    are run beside the real ones on the same operands in float32, and the two results are compared.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._shadows: dict[int, _Shadow] = {}
        self._count = 0
        self._begun: Counter[str] = Counter()
        # whether to follow what float16 rounds to 0 as well, up to where it makes inf or NaN
        self.zeros = False

    @property
    def is_following(self) -> bool:
        """Whether there is an overflow that has not ended yet."""
        return bool(self._shadows)

    def look_ended(self) -> None:
        """Forgets the call."""
        self._shadows.clear()
        self._count = 0

    def saw(self, seen: Seen) -> None:
        """Follows what has overflowed, or finds out that this op has."""
        # The results do not depend on the operands' values: what memory is made like an inf may hold anything.
        name = schema_of(seen.func).name.removeprefix("aten::").rstrip("_")
        if name in _MADE_ANEW or leaves_memory_as_it_was(seen.func):
            return
        held = self._held(seen)
        if self._count >= MAX_SHADOWED:
            self._shadows.clear()
            return
        if held:
            self._follow(seen, held)
        elif any(measurable(t) and t.dtype in NARROW for t in seen.results):
            results = [t for t in _measurable(seen.results) if t.dtype in NARROW]
            extents = measure(results)
            operands = _measurable(seen.operands)
            if not _all_finite(measure(operands)):
                return
            if _all_finite(extents):
                self._look_for_zeros(seen, operands, results, extents)
                return
            self._overflows(seen)

    def _overflows(self, seen: Seen) -> bool:
        """Begins to follow an overflow; not where float32 cannot hold the result of the same operands either, or it was asked for."""
        wide = self._in_float32(seen, {})
        floats, results = _measurable(wide), [t for t in _measurable(seen.results) if t.dtype in NARROW]
        if not floats or not results or not _all_finite(measure(floats)):
            return False
        self._keep(seen, wide, _Overflow(self._told(seen, results, measure(results), floats)))
        return True

    def _held(self, seen: Seen) -> dict[int, _Shadow]:
        """Shadows of the operands, by the identity of the operand."""
        if not self._shadows:
            return {}
        found = ((id(t), self._shadows.get(seen.number(t))) for t in seen.operands)
        return {number: shadow for number, shadow in found if shadow is not None}

    def _look_for_zeros(self, seen: Seen, operands: list[Tensor], results: list[Tensor], extents: list[Extent]) -> None:
        """Begins to follow what a few calls at each line round to 0."""
        if not self.zeros or sum(t.numel() for t in (*operands, *results)) > MOST_ROUNDED:
            return
        told = self._told(seen, results, extents, results)
        at = f"{told.op} {told.source}"
        if self._begun[at] >= ROUNDED_EACH:
            return
        wide = _without_noise(seen, operands, self._in_float32(seen, {}))
        rounded = sum(_vanished(*pair) for pair in zip(seen.results, wide, strict=False))
        if rounded and _all_finite(measure(_measurable(wide))):
            self._begun[at] += 1
            self._keep(seen, wide, _Overflow(replace(told, rounded=rounded, negative=False)))

    def _in_float32(self, seen: Seen, shadows: dict[int, Tensor]) -> list[Tensor]:
        """The results of the same op in float32, where there is memory for it; else nothing is followed any more."""
        held = {id(shadow.tensor): shadow.tensor for shadow in self._shadows.values()}
        wide = [t for t in (*seen.operands, *seen.results) if measurable(t) or id(t) in shadows]
        if fits(bytes_of(held.values()) + bytes_of(wide, 4), seen.results[0].device):
            stand_ins = {number: shadow.clone() for number, shadow in shadows.items()}
            return in_wider(seen.func, seen.arguments, torch.float32, _FLOATS, stand_ins)
        self._shadows.clear()
        self.session.guard.tell(
            _LARGE_TENSORS, "their float32 copies would take too much memory; use a smaller batch to have them checked"
        )
        return []

    def _told(self, seen: Seen, results: list[Tensor], extents: list[Extent], wide: list[Tensor]) -> Overflowed:
        source, fqn = self.here()
        bad = [e for e in extents if not e.finite]
        name = schema_of(seen.func).name.removeprefix("aten::").rstrip("_")
        operands = seen.operands
        if name == "pow":
            squares = any(text in ("2", "2.0") for text in scalars(seen.arguments))
        else:
            same = len(operands) == 2 and seen.number(operands[0]) == seen.number(operands[1])
            squares = name in ("square", "linalg_vector_norm", "norm", "_foreach_norm") or (name == "mul" and same)
        return Overflowed(
            op=seen.name,
            fqn=fqn,
            source=source,
            dtype=dtype_name(results[0]),
            operands=[e.absmax for e in measure(_measurable(seen.operands))],
            float32=max(e.absmax for e in measure(wide)),
            bad=sum(map(_not_finite, bad)),
            elements=sum(t.numel() for t in results),
            squares=squares,
            of_gradients=not self.session.names.gradients().isdisjoint(
                t.data_ptr() for t in _measurable(seen.operands)
            ),
            negative=not any(e.num_nan or e.num_posinf for e in bad),
        )

    def _follow(self, seen: Seen, held: dict[int, _Shadow]) -> None:
        self._count += 1
        before = next(iter(held.values())).overflow
        overflow = replace(before, through=(*before.through, seen.name))
        wide = self._in_float32(seen, {number: shadow.tensor for number, shadow in held.items()})
        if not wide:
            return
        if overflow.op.rounded and not overflow.op.made_by:
            # Follows what was rounded to 0 until it makes inf or NaN of finite operands, where the float32 values do not
            stand_ins = [held[id(t)].tensor if id(t) in held else t for t in seen.operands]
            wide = _without_noise(seen, stand_ins, wide)
            if not _all_finite(measure(_measurable(wide))):
                return
            if not _all_finite(measure(_measurable(seen.results))):
                if not _all_finite(measure(_measurable(seen.operands))):
                    return  # made by something else
                if self._overflows(seen):
                    return  # by itself: no zero among its operands does that
                made = replace(overflow.op, made_by=seen.name, made_at=self.here()[0])
                overflow = replace(overflow, op=made)
            self._keep(seen, wide, overflow)
        else:
            self._follow_overflow(seen, held, overflow, wide)

    def _follow_overflow(self, seen: Seen, held: dict[int, _Shadow], overflow: _Overflow, wide: list[Tensor]) -> None:
        floats = [(real, other) for real, other in zip(seen.results, wide, strict=False) if measurable(real)]
        if not floats or not _all_finite(measure([real for real, _ in floats])):
            self._keep(seen, wide, overflow)
        elif _all_finite(measure(_measurable(other for _, other in floats))):
            self._ended(seen, held, overflow, floats)

    def _keep(self, seen: Seen, wide: Sequence[Tensor], overflow: _Overflow) -> None:
        for real, other in zip(seen.results, wide, strict=False):
            if real.shape == other.shape and (real.is_floating_point() or not torch.equal(real, other)):
                self._shadows[seen.number(real)] = _Shadow(other, overflow)

    def _ended(
        self, seen: Seen, held: dict[int, _Shadow], overflow: _Overflow, floats: list[tuple[Tensor, Tensor]]
    ) -> None:
        followed = [t for t in seen.operands if id(t) in held]
        extents = measure(_measurable(followed))
        if _all_finite(extents):
            return  # a test for finiteness decided something: that is control, and replaces no data
        others = _measurable(t for t in seen.operands if id(t) not in held)
        source, fqn = self.here()
        absorbed = Absorbed(
            op=seen.name,
            source=source,
            scalars=scalars(seen.arguments),
            relative_error=max(_relative_error(real, other) for real, other in floats),
            rescued=sum(map(_not_finite, extents)),
            elements=sum(real.numel() for real, _ in floats),
            bounds=[e.absmax for e in measure(others)],
            by_mask=not all(t.is_floating_point() for t in followed),
            through=list(overflow.through),
            born=overflow.op,
        )
        key = (overflow.op.op, overflow.op.fqn, overflow.op.source, seen.name, source)
        self.session.once(absorbed, key, fqn=fqn)


def _vanished(real: Tensor, other: Tensor) -> int:
    """How many elements are 0 that would not be in float32."""
    if not (real.is_floating_point() and measurable(real) and real.shape == other.shape):
        return 0
    return int(((real == 0) & (other != 0)).sum())


def _without_noise(seen: Seen, operands: Sequence[Tensor], wide: Sequence[Tensor]) -> list[Tensor]:
    """The float32 results with 0 where half precision has 0 too and float32 only the rounding error of a sum."""
    if schema_of(seen.func).name.removeprefix("aten::").rstrip("_") in _MULTIPLIES:
        return list(wide)
    largest = max((e.absmax for e in measure(_measurable(operands)) if e.finite), default=0.0)
    noise = NOISE * torch.finfo(torch.float32).eps * largest
    return [
        torch.where((real == 0) & (other.abs() <= noise), 0, other)
        if real.shape == other.shape and real.is_floating_point() and other.is_floating_point()
        else other
        for real, other in zip(seen.results, wide, strict=False)
    ]


def _may_be_repeated(tensors: Any, readings: Readings) -> bool:
    """Whether an experiment with them neither waits for a device, at each operator of a program, nor for other ranks."""
    found = tensors_of(tensors)
    if any(map(is_spread, found)):
        return False
    return all(readings.reads(one) for one in {tensor.device: tensor for tensor in found}.values())


class OverflowsOutside(Observer):
    """Shows :class:`AbsorbedOverflows` what operators outside of modules make of an overflow, up to the first finite result.

    Nothing is looked at until something is not finite, or 0 in float16. Of backward passes only the program's own code is shown, that of custom
    functions, also of those that modules call: torch's has no guards, and a loss scaler that tests gradients and skips steps is no rescue.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self.whereabouts = Whereabouts(checks.session)  # a node of autograd is numbered by the operator before
        self._check = AbsorbedOverflows(checks)
        self._check.zeros = True
        self._check.whereabouts = self.whereabouts
        self._readings = checks.session.readings
        self._ids = TensorIds()
        self._call = 0

    def wants(self, results: Sequence[Tensor]) -> bool:
        """Whether an operator with these finite results has to be shown: there is something to follow, or they may have been rounded to 0."""
        if self._check.is_following:
            return True
        small = (t for t in results if t.dtype is torch.float16 and measurable(t) and 0 < t.numel() <= MOST_ROUNDED)
        return any(self._readings.reads(t) and not t.all() for t in small)

    def ran_outside(self, func: Any, kept: Arguments, given: Arguments, result: Any) -> None:
        """An operator has run that was given, or has returned, something that is not finite, or for which :meth:`wants` is true.

        Args:
            func: the operator.
            kept: what it was given, with copies of what it has written to since.
            given: the same without copies.
            result: what it returned.
        """
        if not self._check.is_following and not any(t.dtype in NARROW for t in tensors_of(result)):
            return  # nothing is followed, and nothing can begin to be: at nearly each operator of a program that masks with -inf
        if func.namespace != "aten" or not _may_be_repeated((kept, result), self._readings):
            return
        if self.position.call != self._call or not self._check.is_following:
            self._call, self._ids = self.position.call, TensorIds()
            self._check.look_ended()
        pairs = zip(written(func, kept), written(func, given), strict=True)
        before = {id(copy): self._ids.of(tensor)[0] for copy, tensor in pairs}
        for tensor in written(func, given):
            self._ids.wrote(tensor)
        with self.position.aside():
            self._check.saw(Seen(func, kept, given, tensors_of(result), self._ids, before))


def _measurable(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if measurable(tensor)]


def _all_finite(extents: Sequence[Extent]) -> bool:
    return all(extent.finite for extent in extents)


def _not_finite(extent: Extent) -> int:
    """How many elements are not finite."""
    return extent.num_nan + extent.num_posinf + extent.num_neginf


def _relative_error(real: Tensor, other: Tensor) -> float:
    if not real.numel() or real.shape != other.shape:
        return 0.0
    largest = float(other.abs().max())
    return float((real.float() - other.float()).abs().max()) / largest if largest > 0 else 0.0


MAX_BETWEEN = 24
"""Ops between the product and the selection: softmax or sigmoid, biases, groups, masks, casts and reshapes."""
MOST_EXPERTS = 4096
"""A selection among more than this is one among words, not among experts."""

_MANY_TOKENS = "router choices among the scores of many tokens"

_PRODUCTS = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"})
_SELECTION = "aten.topk.default"


@dataclass(slots=True, eq=False)
class _Product:
    """A product in half precision, and the ops that its result went through since."""

    seen: Seen
    source: str | None
    fqn: str | None
    after: list[Seen] = field(default_factory=list)
    derived: set[int] = field(default_factory=set)
    """Numbers of its result and of everything made of it."""
    held: int = 0
    """Bytes of the tensors that it keeps alive."""


class RouterFlips(Observer):
    """Writes a :class:`RouterChoice` for each selection among half-precision scores that something is looked up
    with in the same call. Who only wants the largest scores, to cut off the others, chooses nobody.

    A router scores the experts of each token with a small product and takes the largest. Where the product is computed in half
    precision, scores that differ by less than the rounding error swap. The check runs the product again in float32 on the same
    operands, and everything between it and the selection, and compares the chosen sets.
    """

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._recent: deque[_Product] = deque(maxlen=2)
        # what is to be told of a selection once its indices are used, by their number
        self._judged: dict[int, tuple[RouterChoice, str | None]] = {}
        # whether a product was given up because too much would have been kept for it
        self._dropped = False

    def look_ended(self) -> None:
        """Forgets the call."""
        self._recent.clear()
        self._judged.clear()
        self._dropped = False

    def saw(self, seen: Seen) -> None:
        """Keeps the last products, follows what is made of them, and judges a selection."""
        numbers = [seen.number(t) for t in seen.operands]
        # Selections that have been judged are told of once their result is used.
        for number in self._judged.keys() & set(numbers):
            choice, fqn = self._judged.pop(number)
            self.session.once(choice, (fqn, choice.scores_source, choice.source), fqn=fqn)
        fed = self._fed_by(numbers)
        if fed and seen.name == _SELECTION:
            self._judge(seen, fed[-1])
        elif seen.name == _SELECTION and self._dropped:
            self.session.guard.tell(
                _MANY_TOKENS,
                "keeping their inputs would take too much memory; use a smaller batch to have them checked",
            )
        for product in fed:
            self._follow(seen, product, numbers)
        if seen.name in _PRODUCTS and _may_be_scores(seen):
            self._keep(seen)

    def _fed_by(self, numbers: Sequence[int]) -> list[_Product]:
        """The products that these tensors were made of, the latest last."""
        return [product for product in self._recent if not product.derived.isdisjoint(numbers)]

    def _follow(self, seen: Seen, product: _Product, numbers: Sequence[int]) -> None:
        if not seen.results:  # it writes to an argument, as what copies gathered parameters does
            return
        others = [t for t, number in zip(seen.operands, numbers, strict=True) if number not in product.derived]
        product.held += bytes_of([*others, *seen.results])
        if len(product.after) < MAX_BETWEEN and self._there_is_room(seen):
            product.after.append(seen)
            product.derived.update(seen.number(t) for t in seen.results)
        else:
            self._recent.remove(product)

    def _keep(self, seen: Seen) -> None:
        activations = seen.operands if "bmm" in seen.name else seen.operands[-2:-1]  # the other one is a weight
        held = bytes_of([*activations, *seen.results])
        self._recent.append(_Product(seen, *self.here(), derived={seen.number(seen.results[0])}, held=held))
        while not self._there_is_room(seen):
            self._recent.popleft()

    def _there_is_room(self, seen: Seen) -> bool:
        room = fits(sum(product.held for product in self._recent), seen.results[0].device)
        self._dropped = self._dropped or not room
        return room

    def _judge(self, seen: Seen, product: _Product) -> None:
        chosen, exact = seen.results[1], _again(seen, product)
        if exact is None or chosen.shape != exact.shape or chosen.numel() == 0:
            return
        scores = seen.operands[0]
        flipped = (chosen.sort(-1).values != exact.sort(-1).values).any(-1)
        choice = RouterChoice(
            op=seen.name,
            source=self.here()[0],
            scores_op=product.seen.name,
            scores_source=product.source,
            dtype=dtype_name(product.seen.results[0]),
            experts=scores.shape[-1],
            chosen=chosen.shape[-1],
            tokens=flipped.numel(),
            flipped=int(flipped.sum()),
            tied=_ties(scores, chosen.shape[-1]),
        )
        self._judged[seen.number(chosen)] = choice, product.fqn


def _may_be_scores(seen: Seen) -> bool:
    result = seen.results[0]
    return measurable(result) and result.dtype in HALF and 1 < result.shape[-1] <= MOST_EXPERTS


def _again(selection: Seen, product: _Product) -> Tensor | None:
    """The indices that the selection finds where the product is computed in float32; None where that cannot be had."""
    values: dict[int, Tensor] = {}
    for seen in [product.seen, *product.after, selection]:
        stand_ins = {id(t): values[n].clone() for t in seen.operands if (n := seen.number(t)) in values}
        results = in_wider(seen.func, seen.arguments, torch.float32, HALF, stand_ins)
        if len(results) != len(seen.results):
            return None
        values.update({seen.number(real): other for real, other in zip(seen.results, results, strict=True)})
    return results[1]


def _ties(scores: Tensor, chosen: int) -> int:
    """Tokens whose last chosen and first unchosen score are equal."""
    if chosen >= scores.shape[-1]:
        return 0
    best = scores.topk(chosen + 1, dim=-1).values
    return int((best[..., chosen - 1] == best[..., chosen]).sum())
