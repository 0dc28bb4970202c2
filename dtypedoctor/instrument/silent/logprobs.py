"""Are log-probabilities rounded to half precision before they are compared with others of the same tokens?

A policy's loss compares what the policy says of a token now with what it, or a reference, said before: ``exp(new - old)``. bfloat16 keeps a log-probability of
-9 in steps of 0.06, so what is stored or computed in it makes ratios that are off by percents, although every value is finite. Operators outside of modules,
and those of modules that the routine look sees, are followed from the log-softmax to the difference.
"""

import math
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.multiprocessing.reductions import StorageWeakRef

from dtypedoctor._torch_private import memory_key, schema_of, sequence_number
from dtypedoctor.dtypes import HALF
from dtypedoctor.instrument.contents import tensors_in
from dtypedoctor.instrument.frames import Line, line_of
from dtypedoctor.instrument.naming import dtype_name, short_name
from dtypedoctor.instrument.operators import Arguments, node_of_operator, tensors_of
from dtypedoctor.instrument.silent.look import Seen
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.silent.policies import nodes_behind
from dtypedoctor.instrument.silent.shadows import Shadows
from dtypedoctor.instrument.silent.twins import tokens_given
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.trace.events import NOT_SEEN
from dtypedoctor.trace.records.silent import RoundedLogprobs

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

__all__ = ["LogprobCheck", "is_followed"]

ALL, ONE = "all", "one"
"""Log-probabilities of all choices, and of those that were taken."""
ALL_P, ONE_P = "all p", "one p"
"""The same of probabilities."""
NORMALIZER = "normalizer"
"""The logarithm of a sum of exponentials."""
_KEPT = {
    "_log_softmax": ALL,
    "_softmax": ALL_P,
    "logsumexp": NORMALIZER,
    "binary_cross_entropy_with_logits": ONE,
}
"""What operators return."""
_LOGARITHMS = {ALL_P: ALL, ONE_P: ONE}
_TAKING = {ALL: ONE, ALL_P: ONE_P}
"""What is left when one choice of each is taken."""
_PASSING = frozenset(
    {"index_select", "masked_select", "mul", "neg", "sum", "mean", "cat", "stack", "clone", "where", "masked_fill", "nan_to_num", "div", "flip", "clamp",
     "clip", "constant_pad_nd", "repeat", "copy_", "_to_copy", "index_put_"}
)  # fmt: skip
"""Operators whose result is log-probabilities, or sums of them, where an operand was."""
_WRITING = frozenset({"copy_", "index_put_"})
_MOVING = _WRITING | {"_to_copy", "clone", "index_select", "masked_select", "flip", "where", "cat", "stack"}
"""Those that leave each value as it is."""
_TAKES = frozenset({"gather", "index", "nll_loss_forward"})
_USES = frozenset({"sub", "div", "exp", "log"})
_FOLLOWED = frozenset(_KEPT) | _PASSING | _TAKES | _USES

MOST_KNOWN = 512
"""Tensors that are known, until those that are gone are forgotten."""
LEARNED_BETWEEN = 64
"""Tensors that are met at least before those that are gone are forgotten again."""
MOST_ELEMENTS = 1 << 18
"""Elements of a tensor that is compared or kept."""
JUDGED = 8
"""Differences at one line that are measured; then each whose number is a power of 2. Measuring waits for the device."""
DISTINCT = 4
"""Different values that have to be exact in half precision before a float32 tensor is taken to have been rounded to it."""
NEAR = 0.5
"""Mean difference, as a share of their magnitude and on top of it, up to which two log-probabilities may be of the same tokens."""
OF_ONE_SIGN = 1e-3
"""How far beyond 0 rounding may take a log-probability."""
ROUNDED_SHARE = 0.25
"""Share of a divergence that rounding makes of it at least."""
MOST_ROUNDED = 0.1
"""How far the logarithm of a sum of probabilities may be from 0 by rounding alone; what is further off were no log-probabilities."""
_LOG_ROOT_2_PI = math.log(math.sqrt(2 * math.pi))
"""What the logarithm of a Gaussian's density ends with."""
_FUSED = re.compile(r"grpo|dpo|kto|ppo|simpo|policy|preference", re.IGNORECASE)
"""In the name of an autograd function that computes a whole loss of log-probabilities."""
_NOT_COMPARED = f"{NOT_SEEN} what they are compared with, in a fused loss, say; keep them in float32, or run once with an ordinary loss"
_INSIDE = f"{NOT_SEEN} operators of fused code pass no instrument; run once with an ordinary loss to have them checked"
_NAMED = re.compile(r"log_?p(rob)?s?\b", re.IGNORECASE)


@cache
def is_followed(func: Any) -> bool:
    """Whether an operator may make, pass on or compare log-probabilities."""
    return _base_name(func) in _FOLLOWED


@cache
def _base_name(func: Any) -> str:
    return str(schema_of(func).name).removeprefix("aten::")


@dataclass(slots=True, eq=False)
class _Known:
    """What is known of a piece of memory.

    Attributes:
        held: the memory.
        kind: one of those above.
        rounded: the dtype in half precision that the values have gone through.
        how: ``cast`` or ``computed``; empty where the rounding was not seen.
        source: the line that did it.
        size: of a difference, the larger magnitude of what was subtracted, which says how coarse it is.
    """

    held: StorageWeakRef
    kind: str
    rounded: torch.dtype | None = None
    how: str = ""
    source: str | None = None
    size: Tensor | None = None


class LogprobCheck(Observer):
    """Writes a :class:`RoundedLogprobs` for a comparison of log-probabilities in a loss, of which one side, or both, went through half precision."""

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._looking = self.session.guard.keeping("log-probabilities that a loss compares")
        self._known: dict[int, _Known] = {}
        self._learned = 0
        self._pending: dict[int, RoundedLogprobs] = {}
        self._found: set[str | None] = set()
        self._visits: Counter[str] = Counter()
        self._values: dict[str, set[float]] = {}
        self._casts: dict[torch.dtype, str] = {}
        """The last line that has rounded log-probabilities to a dtype."""
        self._unmet: dict[str, str] = {}
        """Dtypes, by the line that has rounded log-probabilities which no comparison has met yet."""
        self._passes = 0
        self._has_scores = False

    def saw(self, seen: Seen) -> None:
        """An operator has run inside of a module that is looked at."""
        if seen.results and is_followed(seen.func):
            self.ran(seen.func, seen.arguments, seen.results[0], lambda: seen.node)

    def follows(self, func: Any) -> bool:
        """Whether an operator may make, pass on or compare log-probabilities."""
        return is_followed(func)

    def stop(self) -> None:
        """The program has ended."""
        for source, dtype in self._unmet.items():
            self.session.guard.tell(f"log-probabilities rounded to {dtype} at {source}", _NOT_COMPARED)

    def ran(
        self, func: Any, arguments: Arguments, result: Any, node: Callable[[], int | None] = node_of_operator
    ) -> None:
        """An operator for which :func:`is_followed` is true has returned ``result``; ``node`` gets the number of its autograd node, None without gradients.

        Programs call this for nearly everything that they compute: it is over at once where no operand is known.
        """
        name = _base_name(func)
        begins = name in _KEPT or _ends_a_density(name, arguments)
        if not (begins or self._known) or self.position.backward_depth:
            return
        with self._looking:
            result = next(iter(tensors_of(result)), None)
            operands = _numbers([result]) and _numbers(tensors_of(arguments))
            if operands and (begins or any(self._known_now(each) is not None for each in operands)):
                number, line = node(), line_of(sys._getframe())
                with self.position.aside():
                    self._follow(name, arguments, operands, result, number, line)

    def _follow(
        self,
        name: str,
        arguments: Arguments,
        operands: list[Tensor],
        result: Tensor,
        node: int | None,
        line: Line | None,
    ) -> None:
        if name in _KEPT:
            self._made(_KEPT[name], result, line)
        elif _ends_a_density(name, arguments):
            self._made(ONE, result, line)
        elif name in ("sub", "div") and len(operands) == 2:
            self._met(name, operands, result, node, line)
        elif name == "exp":
            operand = operands[0]
            known = self._known_now(operand)
            if known is None or known.kind != ONE:
                return
            rounded = operand.dtype if dtype_name(operand) in HALF else known.rounded
            self._learn(result, ONE_P, rounded=rounded, how=known.how, source=known.source)
        else:
            self._passed(name, arguments, operands, result, line)

    def returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """An outermost module was called on tokens: what its output calls log-probabilities are some. One number for each may be a value or a reward."""
        question = tokens_given(args, kwargs)
        if question is None or self.position.backward_depth or self.position.phase == "generate":
            return
        self._has_scores = True
        for path, tensor in tensors_in(output):
            # An output that is named like log-probabilities of what the model was called with.
            is_one_a_token = tensor.is_floating_point() and tensor.dim() == 2 and len(tensor) == len(question)
            if is_one_a_token and _NAMED.search(path) is not None and self._known_now(tensor) is None:
                self._learn(tensor, ONE)

    def before_backward(self, tensors: list[Tensor]) -> None:
        """A backward pass begins: of the comparisons, those that it starts from are told."""
        if self.position.backward_depth:
            return
        pending = (
            self._pending if self.position.muted else {**self._pending}
        )  # of a call that is made once more, others wait
        if not self.position.muted:
            self._pending.clear()
        self._forget_gone()
        self._passes += 1
        if not pending and not (self._has_scores and _is_turn(self._passes)):
            return
        for node in nodes_behind(tensors):
            number, name = sequence_number(node), node.name()
            found = pending.pop(number, None)
            if found is not None:
                self._found.add(found.used_at)
                self._unmet.pop(found.rounded_at or "", None)
                self.session.once(found, found.used_at, fqn="")
            elif isinstance(node, FunctionCtx) and _FUSED.search(name):
                where = name.removesuffix("Backward")
                self.session.guard.tell(f"log-probabilities inside of {where}", _INSIDE)

    def _learn(self, tensor: Tensor, kind: str, **known: Any) -> None:
        self._learned += 1
        if len(self._known) >= MOST_KNOWN and self._learned >= LEARNED_BETWEEN:
            self._forget_gone()
        if len(self._known) >= MOST_KNOWN:
            return
        storage = tensor.untyped_storage()
        key = memory_key(storage)
        self._known[key] = _Known(StorageWeakRef(storage), kind, **known)

    def _forget_gone(self) -> None:
        self._learned = 0
        self._known = {key: each for key, each in self._known.items() if not each.held.expired()}

    def _made(self, kind: str, result: Tensor, line: Line | None) -> None:
        """Log-probabilities are computed; in half precision they are rounded at once."""
        self._has_scores = True
        if kind == ONE and result.dim() == 0:
            return  # a loss
        if dtype_name(result) in HALF:
            self._learn(result, kind, rounded=result.dtype, how="computed", source=_text(line))
        else:
            self._learn(result, kind)

    def _passed(
        self, name: str, arguments: Arguments, operands: list[Tensor], result: Tensor, line: Line | None
    ) -> None:
        """What is taken of log-probabilities, copied, cast or summed are some."""
        if name in _WRITING:
            operands = operands[-1:]
        known = next(filter(None, map(self._known_now, operands)), None)
        kind = _kind_after(name, known.kind, arguments, result) if known is not None else None
        if known is None or kind is None:
            return
        if dtype_name(result) not in HALF or known.rounded is not None:
            self._learn(result, kind, rounded=known.rounded, how=known.how, source=known.source)
            return
        self._learn(result, kind, rounded=result.dtype, how="cast", source=_text(line))
        if kind == ONE and line is not None:
            self._casts[result.dtype] = line.source
            self._unmet.setdefault(line.source, dtype_name(result))

    def _known_now(self, tensor: Tensor) -> _Known | None:
        known = self._known.get(memory_key(tensor.untyped_storage()))
        return None if known is None or known.held.expired() else known

    def _met(self, name: str, operands: list[Tensor], result: Tensor, node: int | None, line: Line | None) -> None:
        """Two tensors are subtracted or divided."""
        kinds = {self._noted_as_met(each) for each in filter(None, map(self._known_now, operands))}
        one, other = operands
        if name == "sub" and kinds & {ALL, NORMALIZER}:
            self._met_distribution(kinds, one, other, result, node, line)
            return
        use, wanted = ("difference", ONE) if name == "sub" else ("quotient", ONE_P)
        if wanted in kinds and node is not None and _may_be_compared(one, other):
            new, old = sorted(operands, key=lambda each: not each.requires_grad)
            self._judge(new, old, use, node, line)
        elif name == "sub" and kinds == {ONE}:
            # Of two texts by one model, which is compared with that by another: its rounding is that of both
            known = list(filter(None, map(self._known_now, (one, other))))
            rounded = next((each for each in known if each.rounded is not None), None)
            if len(known) < 2 or rounded is None or one.requires_grad != other.requires_grad:
                return
            self._learn(
                result,
                ONE,
                rounded=rounded.rounded,
                how=rounded.how,
                source=rounded.source,
                size=torch.maximum(one.detach().abs(), other.detach().abs()).float(),
            )

    def _met_distribution(
        self, kinds: set[str], one: Tensor, other: Tensor, result: Tensor, node: int | None, line: Line | None
    ) -> None:
        """A distribution and another one, or a mixture of several, are subtracted; or the normalizer from scores."""
        if ALL in kinds and one.shape == other.shape:
            if node is not None:
                self._judge_divergence(one, other, node, line)
        elif NORMALIZER in kinds:
            self._made(ALL if one.shape[-1:] != other.shape[-1:] else ONE, result, line)

    def _noted_as_met(self, known: _Known) -> str:
        self._unmet.pop(known.source or "", None)
        return known.kind

    def _judge(self, new: Tensor, old: Tensor, use: str, node: int, line: Line | None) -> None:
        """Measures how far the rounding of two operands that are compared may have moved their difference."""
        at = _text(line) or ""
        self._visits[at] += 1
        number = self._visits[at]
        if at in self._found or not _is_turn(number):
            return
        sides = {"new": self._rounding_of(new, f"{at} new"), "old": self._rounding_of(old, f"{at} old")}
        rounded = {side: known for side, known in sides.items() if known is not None}
        if not rounded:
            return
        ours, theirs = ((t.detach().float().log() if use == "quotient" else t.detach().float()) for t in (new, old))
        gaps = (ours - theirs).abs()
        counted = gaps.isfinite() & (ours != 0) & (theirs != 0)
        if not bool(counted.any()) or not _are_of_the_same(gaps[counted], theirs[counted]):
            return
        if any(not known.how for known in rounded.values()) and not _are_of_one_sign(ours[counted], theirs[counted]):
            return
        errors = [self._error(known, new if side == "new" else old, use) for side, known in rounded.items()]
        known = rounded.get("old") or rounded["new"]
        assert known.rounded is not None
        error = torch.stack([each for each, _ in errors]).sum(0)
        self._pending[node] = RoundedLogprobs(
            dtype=short_name(known.rounded),
            sides=list(rounded),
            how=known.how or "given",
            rounded_at=known.source or self._casts.get(known.rounded),
            used_at=at,
            use=use,
            elements=int(counted.sum()),
            largest=float(theirs[counted].abs().max()),
            largest_gap=float(gaps[counted].max()),
            error=float(error[counted].max()),
            mean_error=float(error[counted].mean()),
            measured=all(measured for _, measured in errors),
        )  # fmt: skip

    def _judge_divergence(self, one: Tensor, other: Tensor, node: int, line: Line | None) -> None:
        """Measures how far rounding has moved the divergence of two distributions: by what the logarithms of their sums are off 0."""
        at = _text(line) or ""
        self._visits[at] += 1
        if at in self._found or not _is_turn(self._visits[at]):
            return
        known = [each for each in map(self._known_now, (one, other)) if each is not None and each.rounded is not None]
        if not known:
            return
        ours, theirs = _some_rows(one), _some_rows(other)
        divergence = (ours.exp() * (ours - theirs)).sum(-1)
        error = ours.logsumexp(-1).abs() + theirs.logsumexp(-1).abs()
        if not float(error.max()) <= MOST_ROUNDED or float(error.mean()) <= ROUNDED_SHARE * float(
            divergence.mean().abs()
        ):
            return
        first = known[0]
        assert first.rounded is not None
        self._pending[node] = RoundedLogprobs(
            dtype=short_name(first.rounded),
            sides=["new", "old"][: len(known)],
            how=first.how,
            rounded_at=first.source,
            used_at=at,
            use="divergence",
            elements=len(ours),
            largest=float(error.max()),
            largest_gap=float(divergence.mean()),
            error=float(error.mean()),
            mean_error=float(error.mean()),
            measured=True,
        )  # fmt: skip

    def _error(self, known: _Known, tensor: Tensor, use: str) -> tuple[Tensor, bool]:
        """How far each value is from its float64 one, in the logarithm, and whether that is known; half a step at most, where it is not."""
        values = tensor.detach().float()
        assert known.rounded is not None
        coarsest = values if known.size is None else torch.maximum(values.abs(), known.size.reshape(values.shape))
        step = torch.finfo(known.rounded).eps * torch.ldexp(torch.ones_like(values), torch.frexp(coarsest).exponent - 1)
        exact = self.checks[Shadows].exact(tensor)
        measured = exact is not None and bool(((values - exact).abs() <= 4 * step).all())
        error = (values - exact).abs() if exact is not None and measured else torch.where(values == 0, 0, step / 2)
        return (error / values.abs() if use == "quotient" else error), measured

    def _rounding_of(self, tensor: Tensor, key: str) -> _Known | None:
        """What is known of the rounding of an operand; of one of unknown origin, whether its values are exact in half precision."""
        known = self._known_now(tensor)
        if known is not None and known.rounded is not None:
            return known
        held = StorageWeakRef(tensor.untyped_storage())
        if dtype_name(tensor) in HALF:
            return _Known(held, ONE, rounded=tensor.dtype)
        values = self._values.setdefault(key, set())
        values.update(tensor.detach().flatten()[:64].tolist())
        values.discard(0.0)
        if len(values) < DISTINCT:
            return None
        seen = torch.tensor(sorted(values), dtype=torch.float64)
        for half in (torch.bfloat16, torch.float16):
            if bool((seen.to(half).to(seen.dtype) == seen).all()):
                return _Known(held, ONE, rounded=half)
        return None


def _numbers(values: list[Any]) -> list[Tensor]:
    """The tensors of floating-point numbers; none where one of them cannot be read."""
    found = [each for each in values if isinstance(each, Tensor) and each.is_floating_point()]
    return found if all(map(measurable, found)) else []


def _ends_a_density(name: str, arguments: Arguments) -> bool:
    """Whether an operator is the end of a Gaussian's log-density, as ``Normal.log_prob`` computes it."""
    args = arguments[0]
    return name == "sub" and len(args) > 1 and type(args[1]) is float and math.isclose(args[1], _LOG_ROOT_2_PI)


def _may_be_compared(one: Tensor, other: Tensor) -> bool:
    """Whether one of two tensors is trained and the other is not, element for element."""
    return one.shape == other.shape and one.requires_grad != other.requires_grad and one.numel() <= MOST_ELEMENTS


def _some_rows(scores: Tensor) -> Tensor:
    """Distributions of some tokens, evenly spaced, that are few enough to be compared; in float32."""
    rows = scores.detach().flatten(0, -2) if scores.dim() > 1 else scores.detach()[None]
    return rows[:: 1 + rows.numel() // MOST_ELEMENTS].float()


def _is_turn(number: int) -> bool:
    return number <= JUDGED or not number & (number - 1)


def _text(line: Line | None) -> str | None:
    return None if line is None else line.source


def _kind_after(name: str, kind: str, arguments: Arguments, result: Tensor) -> str | None:
    """What the result of an operator is, of whose operands one is of ``kind``; None where it is nothing that is followed."""
    if result.dim() == 0:
        return None  # a loss
    if name == "log":
        return _LOGARITHMS.get(kind)
    if name in ("gather", "nll_loss_forward"):
        return _TAKING.get(kind, kind)
    if name == "index":
        return _TAKING.get(kind, kind) if len(arguments[0][1]) == arguments[0][0].dim() else kind
    allowed = _MOVING | {"masked_fill"} if kind != ONE and kind != ONE_P else _PASSING
    return kind if name in allowed else None


def _are_of_the_same(gaps: Tensor, old: Tensor) -> bool:
    """Whether two log-probabilities may be of the same tokens: those of others are as far apart as they are large."""
    return bool(gaps.max() > 0) and float(gaps.mean()) <= NEAR * float(old.abs().mean()) + NEAR


def _are_of_one_sign(ours: Tensor, theirs: Tensor) -> bool:
    """Whether values may be log-probabilities, or all their negatives: what is below and above 0 is a reward, a value or an advantage."""
    both = torch.cat([ours, theirs])
    return bool((both <= OF_ONE_SIGN).all()) or bool((both >= -OF_ONE_SIGN).all())
