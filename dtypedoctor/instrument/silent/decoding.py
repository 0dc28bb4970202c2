"""Does a model that generates one token at a time say of these tokens what it says of them all at once, when it is trained on them?

Of texts that a model is trained on right after it has generated some, the last tokens are decoded again, one at a time, and compared with a call that gets them
all. Rounding makes them differ a little; how much is measured by the same call in float32. What is further off comes from another way of computing: a
kernel for single tokens with weights of its own, say.
"""

import dis
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from dtypedoctor.dtypes import HALF
from dtypedoctor.instrument.budget import is_checked
from dtypedoctor.instrument.contents import tensors_in
from dtypedoctor.instrument.frames import Line, is_users
from dtypedoctor.instrument.module_tree import named_modules, own_parameters
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.silent.twins import (
    beside,
    counted_among,
    in_dtype,
    main_parameter,
    tokens_given,
    versions_of,
)
from dtypedoctor.instrument.statistics import out_of_their_sight
from dtypedoctor.interruptions import contained
from dtypedoctor.trace.records.silent import DecodedTokens, UpdatedCopies

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

__all__ = ["DecodingCheck"]

ROWS, TOKENS = 4, 16
"""Texts, and tokens of each, that are decoded again."""
ENOUGH = 4
"""Tokens of a text that are compared at least."""
SUSPICIOUS = {True: 0.02, False: 1e-3}
"""Mean difference from which on the rounding is measured; whether half precision is at work."""
BEYOND_ROUNDING = 2.5
"""A difference is more than rounding if it is so many times what float32 changes: two paths that each are so far from float32 are at most 2 apart."""
UNMEASURED = 0.1
"""Mean difference that rounding does not make, where float32 cannot be had."""
_CACHES = "cache", "past_key_values"
"""What a model's answer calls the KV cache: the first since transformers 5.24, the second before."""


class DecodingCheck(Observer):
    """Writes a :class:`DecodedTokens` for a model whose log-probabilities of tokens are others when it gets them all at once."""

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._step = self._steps = 0
        self._generator: ReferenceType[nn.Module] | None = None
        self._region: str | None = None
        self._over = False

    def before_generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``generate`` is called."""
        if self._over or self._step == self.position.step or not args or not isinstance(args[0], nn.Module):
            return
        self._step, self._steps = self.position.step, self._steps + 1
        if is_checked(self._steps) and self._step <= self.checks.look_steps:
            self._generator = ref(args[0])
            self._region = self.session.autocast.dtype(main_parameter(args[0]).device.type)

    def returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """An outermost call has returned: the first one after a generation that the same weights are trained by is looked at."""
        generator = self._generator() if self._generator is not None else None
        if generator is None or self.position.backward_depth or self.position.phase == "generate":
            return
        tokens = tokens_given(args, kwargs)
        is_trained = any(tensor.requires_grad for _, tensor in tensors_in(output))
        if tokens is None or not is_trained or versions_of(module) != versions_of(generator):
            return
        self._generator = None
        with (
            self.position.mute(),
            out_of_their_sight(),
            torch.no_grad(),
        ):  # the models below may be called under autocast
            counted = counted_among(tokens, kwargs.get("attention_mask"))
            # models that count positions from the padding on the left say something else there
            rows = counted[:, 0].nonzero()[:ROWS, 0]
            length = int(counted[rows].sum(1).min()) if len(rows) else 0
            begin = max(1, length - TOKENS - 1)
            if length - begin - 1 >= ENOUGH:
                texts = tokens[rows, :length]
                # a single text may have kernels of its own
                self._judge(
                    _Texts(self, module, texts.expand(min(2, len(tokens)), -1) if len(rows) == 1 else texts, begin)
                )

    def _judge(self, texts: "_Texts") -> None:
        region = self.session.autocast.dtype(texts.tokens.device.type)
        half = dtype_name(main_parameter(texts.module)) in HALF or region in HALF
        at_once, decoded = texts.at_once(region), texts.decoded(self._region)
        gap = _gap(at_once, decoded)
        if gap is None or float(gap.mean()) <= SUSPICIOUS[half]:
            return
        weights = in_dtype(texts.module, torch.float32)
        rounding = _gap(at_once, texts.at_once(None, weights)) if weights is not None else None
        at_most = UNMEASURED if rounding is None else max(SUSPICIOUS[half], BEYOND_ROUNDING * float(rounding.mean()))
        if float(gap.mean()) <= at_most:
            return
        self._over = True
        place = self.names.find(texts.module)
        found = DecodedTokens(
            model=place[0] if place is not None else None,
            dtype=dtype_name(main_parameter(texts.module)),
            tokens=len(gap),
            largest_gap=float(gap.max()),
            mean_gap=float(gap.mean()),
            rounding=float(rounding.mean()) if rounding is not None else None,
            copies=self._updated(texts, at_once, float(gap.mean()), at_most),
        )
        self.session.once(found, found.model, fqn="")

    def _updated(self, texts: "_Texts", at_once: Tensor | None, before: float, at_most: float) -> UpdatedCopies | None:
        """Stale copies of weights that make the difference: with the copies updated, tokens decoded once more do not show it."""
        copies: list[_StaleCopy] = []
        with contained():  # of classes of their own, some tensors cannot be compared
            copies = list(_stale_copies(texts.module))
        if not copies:
            return None
        with _updated(copies):
            after = _gap(at_once, texts.decoded(self._region))
        if after is None or float(after.mean()) > at_most:
            return None
        first = copies[0]
        return UpdatedCopies(
            number=len(copies),
            module=first.module,
            attribute=first.attribute,
            stored_at=_line_that_stores(first),
            before=before,
            after=float(after.mean()),
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Texts:
    """Rows of tokens of one length, without padding, and a model that says something of those from ``begin`` + 1 on."""

    check: DecodingCheck
    module: nn.Module
    tokens: Tensor
    begin: int

    def at_once(self, autocast: str | None, weights: Mapping[str, Tensor] | None = None) -> Tensor | None:
        """The log-probabilities of the tokens (rows, tokens) in a call on all of them, with other ``weights`` where some are given."""

        def scores() -> Tensor:
            answer = torch.func.functional_call(self.module, dict(weights or {}), (), {"input_ids": self.tokens})
            logits: Tensor = answer.logits
            return logits[:, self.begin : -1]

        return self._said(scores, autocast)

    def decoded(self, autocast: str | None) -> Tensor | None:
        """The same where the model gets one token at a time."""

        def scores() -> Tensor:
            answer, said = self.module(input_ids=self.tokens[:, : self.begin], use_cache=True), []
            for place in range(self.begin, self.tokens.shape[1] - 1):
                cache = next(name for name in _CACHES if name in answer)
                one = self.tokens[:, place : place + 1]
                answer = self.module(input_ids=one, use_cache=True, **{cache: answer[cache]})
                said.append(answer.logits[:, -1])
            return torch.stack(said, 1)

        return self._said(scores, autocast)

    def _said(self, scores: Callable[[], Tensor], autocast: str | None) -> Tensor | None:
        given: tuple[Any, dict[str, Any]] = ((self.tokens,), {})
        with contained(), beside(self.check.session, self.module, given, self.tokens.device.type, autocast):
            wanted = self.tokens[:, self.begin + 1 :, None]
            return scores().float().log_softmax(-1).gather(-1, wanted)[..., 0]
        return None


def _gap(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Differences of log-probabilities of the same tokens; None where they cannot be had."""
    if one is None or other is None or one.shape != other.shape:
        return None
    gap = (one - other).abs()
    return gap[gap.isfinite()] if bool(gap.isfinite().any()) else None


@dataclass(frozen=True, slots=True, eq=False)
class _StaleCopy:
    """A tensor of the shape of a weight, with other values than it.

    Attributes:
        module, owner: the module that has the weight, by its dotted name and itself.
        attribute: of the weight or the module, by which the copy is kept.
        kept, weight: the two.
    """

    module: str
    owner: nn.Module
    attribute: str
    kept: Tensor
    weight: Tensor


_REGISTERED = frozenset(vars(nn.Module()))


def _stale_copies(model: nn.Module) -> Iterator[_StaleCopy]:
    """What may be stale copies, on parameters and on modules. Waits for the device."""
    for name, module in named_modules(model):
        weights = own_parameters(module)
        for holder, of in [*((weight, [weight]) for weight in weights), (module, weights)]:
            beside = {key: value for key, value in vars(holder).items() if key not in _REGISTERED}
            for attribute, kept in [(key, each) for key, value in beside.items() for _, each in tensors_in(value)]:
                weight = _other_weight(kept, of)
                if weight is not None:
                    yield _StaleCopy(name, module, attribute, kept, weight)


def _other_weight(kept: Tensor, weights: Iterable[Tensor]) -> Tensor | None:
    """The one weight of its shape, where it has other values."""
    alike = [weight for weight in weights if weight.shape == kept.shape and weight is not kept]
    is_other = len(alike) == 1 and kept.is_floating_point() and not torch.equal(alike[0].detach().to(kept), kept)
    return alike[0] if is_other else None


@contextmanager
def _updated(copies: Iterable[_StaleCopy]) -> Iterator[None]:
    """Inside, the copies are what their weights are now."""
    before = [(copy.kept, copy.kept.data) for copy in copies]
    try:
        for copy in copies:
            copy.kept.data = copy.weight.detach().to(copy.kept)
        yield
    finally:
        for kept, data in before:
            kept.data = data


def _line_that_stores(copy: _StaleCopy) -> str | None:
    """The first line of code that sets an attribute of its name: in the file of the module's class, else in the only file that does; None otherwise."""
    lines = [line for each in gc.get_objects() for line in _storing(each, copy.attribute)]
    classes = {cls.__module__ for cls in type(copy.owner).__mro__}
    lines = [line for line in lines if line.module in classes] or lines
    if len({line.code.co_filename for line in lines}) != 1:
        return None
    return min(lines, key=lambda line: line.number).source


def _storing(function: object, attribute: str) -> Iterator[Line]:
    """The lines of a function of the program, or of a library, that set an attribute of this name; none of any other object."""
    if type(function) is not FunctionType:
        return
    code, module = function.__code__, function.__globals__.get("__name__", "")
    if attribute not in code.co_names or not is_users(module):
        return
    for step in dis.get_instructions(code):
        number = step.positions.lineno if step.positions is not None else None
        if step.opname == "STORE_ATTR" and step.argval == attribute and number is not None:
            yield Line(code, module, number)
