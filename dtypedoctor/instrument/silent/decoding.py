"""Does a model that generates one token at a time say of these tokens what it says of them all at once, when it is trained on them?

Log-probabilities of generated tokens are kept, and compared with those of the next call outside of ``generate`` that gets the same tokens as long as no weight has
changed. Rounding makes them differ a little; how much is measured by the same call in float32. What is further off comes from another way of computing: a
kernel for single tokens with weights of its own, say.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import as_the_program
from dtypedoctor.dtypes import HALF
from dtypedoctor.instrument.module_tree import modules_in
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.silent.policies import is_random
from dtypedoctor.instrument.silent.stale_copies import StaleCopy, line_that_stores, stale_copies, updated
from dtypedoctor.instrument.silent.twins import Asked, beside, in_dtype, made_again, main_parameter
from dtypedoctor.interruptions import contained
from dtypedoctor.trace.records.silent import DecodedTokens, UpdatedCopies

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

__all__ = ["DecodingCheck"]

ROWS, TOKENS = 16, 64
"""Generated texts, and tokens of each, that are kept."""
GENERATIONS = 2
"""Calls of ``generate`` that are followed in a step; the steps are 1, 2, 4, 8 and so on."""
COMPARED = 16
"""Calls that are compared with a generation; each waits for the device."""
ENOUGH = 4
"""Tokens that are compared at least."""
SUSPICIOUS = {True: 0.02, False: 1e-3}
"""Mean difference from which on the rounding is measured; whether half precision is at work."""
BEYOND_ROUNDING = 2.5
"""A difference is more than rounding if it is so many times what float32 changes: two paths that each are so far from float32 are at most 2 apart."""
BEYOND_BEFORE = 8
"""And where float32 cannot be had, so many times what it was in an earlier step."""
_PROPOSED = "assistant_model", "prompt_lookup_num_tokens", "penalty_alpha"
"""Options of ``generate`` with which a call gets tokens that are not what the one before has chosen."""
_CACHES = "cache", "past_key_values"
"""What a model's answer calls the KV cache: the first since transformers 5.24, the second before."""
_BESIDE_IMAGES = (
    "whether texts about images (or other content) are generated as they are trained",
    "log-probabilities of decoding and training are compared of text alone; run once without images to have them compared",
)
UNMEASURED = 0.05, 0.1
"""Mean differences that rounding does not make where float32 cannot be had: with an earlier step to compare with, and without one."""


@dataclass(slots=True, eq=False)
class _Generation:
    """Texts that a model generates, and what it said of each token.

    Attributes:
        model: whose ``forward`` generates.
        versions, adapters, autocast: of its weights, which of its adapters are in use, and the region that it generates in.
        temperature: of sampling.
        tokens: prompt and generated tokens, a tensor (rows, 1 or more) for each call.
        mask: which tokens of the prompt count.
        scores: of the token that comes next, by the last call.
        said: for each generated token its log-probability (rows), at temperature 1 and at the temperature of sampling; NaN where it has none.
        left: calls that may still be compared with it.
    """

    model: ReferenceType[nn.Module]
    versions: int
    adapters: tuple[Any, ...]
    autocast: str | None
    temperature: float
    tokens: list[Tensor]
    mask: Tensor
    scores: Tensor | None
    said: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    left: int = COMPARED

    def add(self, chosen: Tensor, scores: Tensor | None) -> None:
        """The tokens ``chosen`` (rows) are what the last call was sampled for; ``scores`` are those of the next ones."""
        if self.scores is not None and len(self.said) < TOKENS:
            logits = self.scores.float()
            both = (logits.log_softmax(-1), (logits / self.temperature).log_softmax(-1))
            known = chosen.clamp(0, logits.shape[-1] - 1)  # on CUDA an index out of range ends the program
            plain, cooled = (each.gather(-1, known[:, None])[:, 0].where(known == chosen, torch.nan) for each in both)
            self.said.append((plain, cooled))
            self.tokens.append(chosen[:, None].clone())
        self.scores = (
            scores.clone() if scores is not None and len(self.said) < TOKENS else None
        )  # the rest can be freed

    def texts(self) -> list[tuple[list[int], list[int]]]:
        """Of each row the prompt and the generated tokens. Waits for the device."""
        prompts = [
            [token for token, counted in zip(tokens, counts, strict=True) if counted]
            for tokens, counts in zip(self.tokens[0].tolist(), self.mask.tolist(), strict=True)
        ]
        generated = torch.cat(self.tokens[1:], 1).tolist() if self.said else [[] for _ in prompts]
        return list(zip(prompts, generated, strict=True))


class DecodingCheck(Observer):
    """Writes a :class:`DecodedTokens` for a model whose log-probabilities of generated tokens are others when it gets them all at once."""

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._temperature = 1.0
        self._is_plain = True
        self._step = self._followed = 0
        self._generations: list[_Generation] = []
        self._open: _Generation | None = None
        self._before: float | None = None
        self._over = False

    def before_generate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """``generate`` is called."""
        self._open = None
        if self._step != self.position.step:
            self._step, self._followed = self.position.step, 0
            self._generations.clear()
        self._followed += 1
        self._temperature = _temperature(args, kwargs)
        self._is_plain = _is_plain_sampling(args, kwargs)

    def returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """An outermost call has returned."""
        if self._over or self.position.backward_depth:
            return
        generating = self.position.phase == "generate"
        if not (self._may_follow() if generating else self._generations):
            return
        with self.position.mute(), torch.no_grad():
            call = Asked.of(self.session, module, args, kwargs, output)
            if call is None or call.question.dim() != 2:
                return
            if call.content is not None:  # another image may stand beside the same tokens
                self.session.guard.tell(*_BESIDE_IMAGES)
                return
            if generating:
                self._follow(module, call)
            else:
                self._compare(module, call)

    def _may_follow(self) -> bool:
        """Whether this step's generations are followed: those of steps 1, 2, 4, 8 …, as many as there may be."""
        return self._is_plain and self._followed <= GENERATIONS and not self._step & (self._step - 1)

    def _follow(self, module: nn.Module, call: Asked) -> None:
        if call.output.dim() != 3:
            self._open = None
            return
        tokens, scores = call.question[:ROWS], call.output[:ROWS, -1].detach()
        known = self._open
        if known is not None and known.model() is not module:
            return  # an encoder, or a smaller model that proposes tokens
        if known is not None and len(tokens) == len(known.mask) and self._goes_on(known, call):
            known.add(tokens[:, -1], scores)
            return
        self._open = None
        if len(self._generations) >= GENERATIONS or any(map(is_random, modules_in(module))):
            return
        self._open = _Generation(
            ref(module), call.versions, _adapters(module), call.autocast, self._temperature, [tokens.clone()], call.mask[:ROWS].clone(), scores.clone()
        )  # fmt: skip
        self._generations.append(self._open)

    @staticmethod
    def _goes_on(known: _Generation, call: Asked) -> bool:
        """Whether a call gets one token more: alone where the others are in a cache, or with all of them."""
        length = call.question.shape[1]
        return length == 1 or length == known.mask.shape[1] + len(known.said) + 1

    def _compare(self, module: nn.Module, call: Asked) -> None:
        for generation in self._generations:
            generator = generation.model()
            if generator is None or generation.versions != call.versions or _adapters(module) != generation.adapters:
                continue
            if not generation.said or generation.left <= 0:
                continue
            generation.left -= 1
            pairs = _pairs(generation, call)
            if len(pairs) >= ENOUGH:
                self._judge(module, generation, call, pairs)
                return

    def _judge(self, module: nn.Module, generation: _Generation, call: Asked, pairs: "list[_Pair]") -> None:
        gap = _gap(generation, call, pairs)
        if gap is None:
            return
        random = any(map(is_random, modules_in(module)))
        half = dtype_name(main_parameter(module)) in HALF or call.autocast in HALF
        if float(gap.mean()) <= SUSPICIOUS[half]:
            self._before = float(gap.mean())
            return
        at_once, rounding = self._rounding(module, call, pairs)
        if random and at_once is None:
            return
        if random and at_once is not None:
            gap = _gap(generation, at_once, pairs)
        at_most = max(SUSPICIOUS[half], self._at_most(rounding))
        if gap is None or float(gap.mean()) <= at_most:
            return
        self._over = True
        place = self.names.find(module)
        found = DecodedTokens(
            model=place[0] if place is not None else None,
            dtype=dtype_name(main_parameter(module)),
            tokens=len(gap),
            largest_gap=float(gap.max()),
            mean_gap=float(gap.mean()),
            rounding=rounding,
            before=self._before,
            random=random,
            copies=self._updated(module, at_once or call, pairs, generation, at_most),
        )
        self.session.once(found, found.model, fqn="")

    def _updated(
        self, module: nn.Module, call: Asked, pairs: "list[_Pair]", generation: _Generation, at_most: float
    ) -> UpdatedCopies | None:
        """Stale copies of weights that make the difference: tokens decoded again show it, and with the copies updated they do not."""
        copies: list[StaleCopy] = []
        with contained():  # of classes of their own, some tensors cannot be compared
            copies = stale_copies(module)
        before = self._decoded_again(module, call, pairs, generation) if copies else None
        if before is None or before <= at_most:
            return None
        with updated(copies):
            after = self._decoded_again(module, call, pairs, generation)
        if after is None or after > at_most:
            return None
        first = copies[0]
        return UpdatedCopies(
            number=len(copies),
            module=first.module,
            attribute=first.attribute,
            stored_at=line_that_stores(first),
            before=before,
            after=after,
        )

    def _decoded_again(
        self, module: nn.Module, call: Asked, pairs: "list[_Pair]", generation: _Generation
    ) -> float | None:
        """Mean difference between a call and the tokens of one of its rows, decoded one at a time; None where that cannot be had."""
        [(row, _)] = Counter(row for _, _, row, _ in pairs).most_common(1)
        chosen = [pair for pair in pairs if pair[2] == row]
        columns = [column for *_, column in chosen]
        several = min(len(generation.mask), 2)  # a single text may have kernels of its own
        tokens = call.question[row].expand(several, -1)
        said = []
        with contained(), as_the_program(), beside(self.session, module, call, generation.autocast):
            answer = module(input_ids=tokens[:, : columns[0]], use_cache=True)
            for column in columns[:-1]:
                cache = {name: answer[name] for name in _CACHES if name in answer}
                answer = module(input_ids=tokens[:, column : column + 1], use_cache=True, **cache)
                said.append(answer.logits[0, -1].float().log_softmax(-1)[tokens[0, column + 1]])
        now = _of_call(call, chosen[1:])
        return float((torch.stack(said) - now).abs().mean()) if now is not None and 0 < len(said) == len(now) else None

    def _at_most(self, rounding: float | None) -> float:
        """Mean difference of log-probabilities up to which rounding may be the reason."""
        if rounding is not None:
            return BEYOND_ROUNDING * rounding
        if self._before is not None:
            return max(BEYOND_BEFORE * self._before, UNMEASURED[0])
        return UNMEASURED[1]

    def _rounding(self, module: nn.Module, call: Asked, pairs: "list[_Pair]") -> tuple[Asked | None, float | None]:
        """The call made again without dropout, and the mean difference between that and the same in float32; None for what cannot be had."""
        weights = in_dtype(module, torch.float32)
        again = made_again(self.session, module, call, {}, call.autocast) if call.repeatable else None
        if again is None or weights is None:
            return again, None
        wide = made_again(self.session, module, call, weights, None)
        return again, _between(again, wide, pairs) if wide is not None else None


_Pair = tuple[int, int, int, int]
"""Row and number of a generated token, row and column of the same one in another call."""


def _pairs(generation: _Generation, call: Asked) -> list[_Pair]:
    """The generated tokens that a call got behind the same tokens. Waits for the device."""
    texts = generation.texts()
    found = []
    for row, (tokens, counts) in enumerate(zip(call.question.tolist(), call.mask.tolist(), strict=True)):
        if not counts[0]:
            continue  # padded on the left: models that count positions from there say something else
        text = tokens[: sum(counts)]
        best: list[_Pair] = []
        for number, (prompt, generated) in enumerate(texts):
            shared = _shared(number, generated, row, text, len(prompt)) if text[: len(prompt)] == prompt else []
            best = shared if len(shared) > len(best) else best
        found += best
    return found


def _shared(number: int, generated: list[int], row: int, text: list[int], begin: int) -> list[_Pair]:
    pairs = []
    for place, (ours, theirs) in enumerate(zip(generated, text[begin:], strict=False)):
        if ours != theirs:
            break
        pairs.append((number, place, row, begin + place))
    return pairs


def _gap(generation: _Generation, call: Asked, pairs: list[_Pair]) -> Tensor | None:
    """Differences of the log-probabilities, for the temperature at which they are smaller; None where there are too few."""
    now = _of_call(call, pairs)
    if now is None:
        return None
    gaps = []
    for which in (0, 1):
        said = torch.stack([generation.said[place][which][number] for number, place, _, _ in pairs]).to(now.device)
        gaps.append((said - now).abs()[(now < 0) & now.isfinite() & said.isfinite()])
    best = min(gaps, key=lambda each: float(each.mean()) if len(each) else 0.0)
    return best if len(best) >= ENOUGH else None


def _between(one: Asked, other: Asked, pairs: list[_Pair]) -> float | None:
    """Mean difference of two calls on the same tokens."""
    ours, theirs = _of_call(one, pairs), _of_call(other, pairs)
    if ours is None or theirs is None:
        return None
    gap = (ours - theirs).abs()
    gap = gap[gap.isfinite()]
    return float(gap.mean()) if len(gap) else None


def _of_call(call: Asked, pairs: list[_Pair]) -> Tensor | None:
    """What a call says of the tokens, as log-probabilities; 0 where it says nothing of one."""
    length, places = call.question.shape[1], call.output.shape[1]
    if call.output.dim() == 2 and places != length - 1:
        return None
    found = []
    for _, _, row, column in pairs:
        place = column - 1 - (length - places if call.output.dim() == 3 else 0)
        if place < 0:
            found.append(call.output.new_zeros((), dtype=torch.float32))
        elif call.output.dim() == 2:
            found.append(call.output[row, place].float())
        else:
            found.append(call.output[row, place].float().log_softmax(-1)[call.question[row, column]])
    return torch.stack(found)


def _temperature(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> float:
    """The temperature that ``generate`` samples with; 1 where it says none."""
    model = args[0] if args else None
    configured = kwargs.get("generation_config") or getattr(model, "generation_config", None)
    for temperature in (kwargs.get("temperature"), getattr(configured, "temperature", None)):
        if isinstance(temperature, int | float) and temperature > 0:
            return float(temperature)
    return 1.0


def _is_plain_sampling(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether each row of a call goes on with the token that was chosen for it: not with beams, which change places, nor proposed tokens."""
    configured = kwargs.get("generation_config") or getattr(args[0] if args else None, "generation_config", None)
    options = {name: kwargs.get(name, getattr(configured, name, None)) for name in ("num_beams", *_PROPOSED)}
    return options.pop("num_beams") in (None, 1) and not any(value is not None for value in options.values())


def _adapters(model: nn.Module) -> tuple[Any, ...]:
    """Which of peft's adapters are in use: a text that was generated without them is meant to be so."""
    layers = (each for each in modules_in(model) if isinstance(getattr(type(each), "disable_adapters", None), property))
    return tuple((bool(layer.disable_adapters), str(getattr(layer, "active_adapters", ""))) for layer in layers)
