"""Routers whose choice of experts hangs on rounding.

A router scores the experts of each token with a small product and takes the largest. Where the product is computed in half
precision, scores that differ by less than the rounding error swap. The check runs the product again in float32 on the same
operands, and everything between it and the selection, and compares the chosen sets.
"""

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dtypedoctor._torch_private import tree_map
from dtypedoctor.instrument.headroom import bytes_of, fits
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.schema import tensors_of
from dtypedoctor.instrument.silent.look import Seen
from dtypedoctor.instrument.silent.notes import Notes
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.instrument.whereabouts import OUTSIDE, OpPlace, Whereabouts
from dtypedoctor.interruptions import contained
from dtypedoctor.trace.records.silent import RouterChoice

HALF = (torch.float16, torch.bfloat16)
MAX_BETWEEN = 24
"""Ops between the product and the selection: softmax or sigmoid, biases, groups, masks, casts and reshapes."""
MOST_EXPERTS = 4096
"""A selection among more than this is one among words, not among experts."""

TOO_LARGE = "router choices among the scores of many tokens"

_PRODUCTS = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default", "aten.baddbmm.default"})
_SELECTION = "aten.topk.default"


@dataclass(slots=True, eq=False)
class _Product:
    """A product in half precision, and the ops that its result went through since."""

    seen: Seen
    place: OpPlace
    after: list[Seen] = field(default_factory=list)
    derived: set[int] = field(default_factory=set)
    """Numbers of its result and of everything made of it."""
    held: int = 0
    """Bytes of the tensors that it keeps alive."""


@dataclass(slots=True)
class RouterFlips:
    """Writes a :class:`RouterChoice` for each selection among half-precision scores that something is looked up
    with in the same call. Who only wants the largest scores, to cut off the others, chooses nobody."""

    notes: Notes
    whereabouts: Whereabouts
    _recent: deque[_Product] = field(default_factory=lambda: deque(maxlen=2))
    _judged: dict[int, tuple[RouterChoice, str | None]] = field(default_factory=dict)
    """What is to be told of a selection once its indices are used, by their number."""
    _dropped: bool = False
    """Whether a product was given up because too much would have been kept for it."""

    def end(self) -> None:
        """Forgets the call."""
        self._recent.clear()
        self._judged.clear()
        self._dropped = False

    def saw(self, seen: Seen) -> None:
        """Keeps the last products, follows what is made of them, and judges a selection."""
        numbers = [seen.number(t) for t in seen.operands]
        self._tell_of_used(numbers)
        fed = self._fed_by(numbers)
        if fed and seen.name == _SELECTION:
            self._judge(seen, fed[-1])
        elif seen.name == _SELECTION and self._dropped:
            self.notes.leave_out(TOO_LARGE, "what they were made of would have to be kept; a smaller batch is checked")
        for product in fed:
            self._follow(seen, product, numbers)
        if seen.name in _PRODUCTS and _may_be_scores(seen):
            self._keep(seen)

    def _fed_by(self, numbers: Sequence[int]) -> list[_Product]:
        """The products that these tensors were made of, the latest last."""
        return [product for product in self._recent if not product.derived.isdisjoint(numbers)]

    def _tell_of_used(self, numbers: Sequence[int]) -> None:
        """Tells of selections that have been judged, and whose result is used now."""
        for number in self._judged.keys() & set(numbers):
            choice, fqn = self._judged.pop(number)
            self.notes.once(choice, (fqn, choice.scores_source, choice.source), fqn)

    def _follow(self, seen: Seen, product: _Product, numbers: Sequence[int]) -> None:
        others = [t for t, number in zip(seen.operands, numbers, strict=True) if number not in product.derived]
        product.held += bytes_of([*others, *seen.results])
        if len(product.after) < MAX_BETWEEN and self._there_is_room(seen):
            product.after.append(seen)
            product.derived.update(seen.number(t) for t in seen.results)
        else:
            self._recent.remove(product)

    def _keep(self, seen: Seen) -> None:
        activations = seen.operands if "bmm" in seen.name else seen.operands[-2:-1]  # the other one is a weight
        place = self.whereabouts.here(sys._getframe(), "cpu")
        held = bytes_of([*activations, *seen.results])
        self._recent.append(_Product(seen, place, derived={seen.number(seen.results[0])}, held=held))
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
        source = self.whereabouts.here(sys._getframe(), "cpu").source
        fqn = product.place.fqn if product.place.root != OUTSIDE else None
        choice = RouterChoice(
            op=seen.name,
            source=source,
            scores_op=product.seen.name,
            scores_source=product.place.source,
            dtype=dtype_name(product.seen.results[0]),
            experts=scores.shape[-1],
            chosen=chosen.shape[-1],
            tokens=flipped.numel(),
            flipped=int(flipped.sum()),
            tied=_ties(scores, chosen.shape[-1]),
        )
        self._judged[seen.number(chosen)] = choice, fqn


def _may_be_scores(seen: Seen) -> bool:
    result = seen.results[0]
    return measurable(result) and result.dtype in HALF and 1 < result.shape[-1] <= MOST_EXPERTS


def _again(selection: Seen, product: _Product) -> Tensor | None:
    """The indices that the selection finds where the product is computed in float32; None where that cannot be had."""
    values: dict[int, Tensor] = {}
    results: list[Tensor] = []
    with contained():  # scores that cannot be computed again are not judged
        for one in [product.seen, *product.after, selection]:
            if torch.Tag.nondeterministic_seeded in one.func.tags:
                return None
            stand_ins = {id(t): values[n] for t in one.operands if (n := one.number(t)) in values}
            args, kwargs = tree_map(partial(_replaced, stand_ins), one.arguments)
            results = tensors_of(one.func(*args, **kwargs))
            values.update({one.number(real): other for real, other in zip(one.results, results, strict=True)})
        return results[1]
    return None


def _replaced(stand_ins: dict[int, Tensor], value: Any) -> Any:
    if isinstance(value, Tensor) and id(value) in stand_ins:
        return stand_ins[id(value)].clone()
    if measurable(value):
        return value.float() if value.dtype in HALF else value.clone()
    return torch.float32 if isinstance(value, torch.dtype) and value in HALF else value


def _ties(scores: Tensor, chosen: int) -> int:
    """Tokens whose last chosen and first unchosen score are equal."""
    if chosen >= scores.shape[-1]:
        return 0
    best = scores.topk(chosen + 1, dim=-1).values
    return int((best[..., chosen - 1] == best[..., chosen]).sum())
