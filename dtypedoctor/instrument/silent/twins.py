"""Two models of the same weights in one program that compute in different dtypes: a policy and its reference, or its generator.

Where both have been called on the same tokens, one of the calls is made again with each of them, and once more with the wider one in the dtype of the other. If
the difference of their log-probabilities is gone then, the dtype has made it.
"""

import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dtypedoctor._torch_private import version_of
from dtypedoctor.instrument.contents import tensors_in
from dtypedoctor.instrument.live_call import AutocastState, LiveCall
from dtypedoctor.instrument.module_tree import ByModule, named_tensors, parameters_in
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.operators import fits
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.statistics import measurable, out_of_their_sight
from dtypedoctor.instrument.untouched import CannotReplayError, KeptMemory, undone
from dtypedoctor.interruptions import contained
from dtypedoctor.trace.records.execution import AutocastRegion
from dtypedoctor.trace.records.silent import Twins

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

__all__ = ["TwinCheck", "beside", "counted_among", "in_dtype", "main_parameter", "tokens_given", "versions_of"]

DISTRIBUTIONS, PLACES = 64, 16
"""Distributions of a call that are compared, and positions of a row."""
CALLS = 32
"""Calls of a model of which the tokens are kept, to see whether another one gets them too."""
ATTEMPTS, EXPERIMENTS = 8, 16
"""Calls that are looked at for a pair of models, each of which waits for the device; and those that are made again, of all pairs."""
ELEMENTS = 8
"""Elements of each parameter by which weights are recognized as the same."""
LARGEST_INPUT = 1_000_000
"""Elements of an input of a call that is made again."""
LARGEST_KEPT = 1 << 17
"""Tokens of a call that are kept."""
LIKELY = math.log(1e-3)
"""Log-probability below which a choice is too unlikely to matter."""
SAME_OUTPUT = 1e-5
"""Largest difference of log-probabilities that is none."""
_INSTEAD = frozenset({"encoder_outputs", "inputs_embeds"})
"""Arguments that stand in the place of tokens."""
_WRAPPERS = ("_orig_mod.", "module.", "base_model.model.", "base_layer.", "original_module.")
"""What compilers, DDP and peft put into the names of parameters."""
_ADAPTERS = ("lora_", "modules_to_save.")
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(slots=True, eq=False)
class _Model:
    """A model that is called on tokens.

    Attributes:
        model: itself.
        tokens: the rows of its last calls, with which of them count.
        autocast: the region that it was last called in, or that its own ``forward`` opens.
        trained: whether a gradient can come back.
    """

    model: ReferenceType[nn.Module]
    tokens: deque[tuple[Tensor, Tensor]] = field(default_factory=lambda: deque(maxlen=CALLS))
    autocast: str | None = None
    trained: bool = False

    def rows(self) -> set[tuple[int, ...]]:
        """The rows without padding. Waits for the device."""
        return {
            tuple(token for token, counted in zip(row, counts, strict=True) if counted)
            for tokens, mask in self.tokens
            for row, counts in zip(tokens.tolist(), mask.tolist(), strict=True)
        }

    def width(self) -> int:
        """Bits that it computes with, more or less: of its parameters, halved by a region of autocast."""
        model = self.model()
        parameter = main_parameter(model) if model is not None else None
        if parameter is None:
            return 0
        bits = torch.finfo(parameter.dtype).bits if parameter.is_floating_point() else 8
        return bits * 2 - (self.autocast is not None)


@dataclass(frozen=True, slots=True)
class _Found:
    """A pair of which is to be told unless the first optimizer step shows that the generator is an average of the trained model."""

    twins: Twins
    trainer: ReferenceType[nn.Module]
    generator: ReferenceType[nn.Module]
    versions: int
    at: tuple[int, int]
    phase: str

    def is_of_average(self) -> bool:
        """Whether the generator has changed since, and not to the weights of the trained model: it is wider on purpose."""
        trainer, generator = self.trainer(), self.generator()
        if trainer is None or generator is None or versions_of(generator) == self.versions:
            return False
        return not _same_weights(trainer, generator, exactly=True)


class TwinCheck(Observer):
    """Writes a :class:`Twins` for two models of the same weights that are called on the same tokens and compute in different dtypes."""

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._families: dict[int, dict[int, _Model]] = {}
        """Models whose parameters have the same names and shapes, by identity."""
        self._family_of: ByModule[int] = ByModule()
        self._attempts: Counter[tuple[int, int]] = Counter()
        self._experiments = 0
        self._found: list[_Found] = []
        self._region: str | None = None
        """The region that the outermost call at work has opened itself."""

    def before_call(self, module: nn.Module) -> None:
        """An outermost call begins."""
        self._region = None
        self._tell_of([found for found in self._found if found.at[0] < self.position.step])

    def entered(self, region: AutocastRegion) -> None:
        """An autocast region is entered."""
        if self.position.stack and self._region is None:
            self._region = region.dtype

    def stop(self) -> None:
        """The program has ended."""
        self._tell_of(list(self._found))

    def returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """An outermost call has returned."""
        if self.position.backward_depth or self.position.phase == "generate" or self._experiments == EXPERIMENTS:
            return
        tokens = tokens_given(args, kwargs)
        if tokens is None:
            return
        with (
            self.position.mute(),
            out_of_their_sight(),
            torch.no_grad(),
        ):  # the models below may be called under autocast
            mask = counted_among(tokens, kwargs.get("attention_mask"))
            family = self._families.setdefault(self._like(module), {})
            for gone in [number for number, each in family.items() if each.model() is None]:
                del family[gone]
                self._attempts = Counter({pair: count for pair, count in self._attempts.items() if gone not in pair})
            mine = family.setdefault(id(module), _Model(ref(module)))
            mine.autocast = self.session.autocast.dtype(tokens.device.type) or self._region
            mine.trained |= any(tensor.requires_grad for _, tensor in tensors_in(output))
            if tokens.numel() <= LARGEST_KEPT:
                mine.tokens.append((tokens.clone(), mask.clone()))
            for number, other in family.items():
                pair = (min(number, id(module)), max(number, id(module)))
                if other is mine or not (mine.trained or other.trained) or self._attempts[pair] >= ATTEMPTS:
                    continue
                self._attempts[pair] += 1
                if mine.rows() & other.rows() and self._compare(args, kwargs, tokens, mask, mine, other):
                    self._attempts[pair] = ATTEMPTS

    def _like(self, module: nn.Module) -> int:
        """Equal for models whose parameters have the same names and shapes, apart from adapters."""
        known = self._family_of.get(module)
        if known is None:
            shapes = {name: parameter.shape for name, parameter in _weights(module).items()}
            known = self._family_of[module] = hash(tuple(sorted(shapes.items())))
        return known

    def _compare(
        self, args: Any, kwargs: Mapping[str, Any], tokens: Tensor, mask: Tensor, mine: _Model, other: _Model
    ) -> bool:
        """Makes a call again with both models, and in one dtype; whether that could be done."""
        ours, theirs = (mine, other) if mine.trained else (other, mine)
        trainer, generator = ours.model(), theirs.model()
        if trainer is None or generator is None or not _same_weights(trainer, generator):
            return False
        wide, narrow = sorted(((ours, trainer), (theirs, generator)), key=lambda each: -each[0].width())
        weights = _in_the_dtypes_of(wide[1], narrow[1])
        if weights is None or (not weights and wide[0].autocast == narrow[0].autocast):
            return True  # what differs is no dtype

        def said(model: nn.Module, weights: dict[str, Tensor], autocast: str | None) -> Tensor | None:
            with contained(), beside(self.session, model, (args, kwargs), tokens.device.type, autocast):
                return _log_probabilities(torch.func.functional_call(model, weights, args, dict(kwargs)), tokens, mask)
            return None

        self._experiments += 1
        as_it_is, target = said(wide[1], {}, wide[0].autocast), said(narrow[1], {}, narrow[0].autocast)
        cast = said(wide[1], weights, narrow[0].autocast)
        gaps, moved, apart = _gaps(as_it_is, target), _gaps(as_it_is, cast), _gaps(cast, target)
        if gaps is None or moved is None or apart is None or target is None:
            return False
        if float(gaps.max()) > SAME_OUTPUT:
            twins = Twins(
                trainer=self._number(trainer),
                generator=self._number(generator),
                trainer_dtype=dtype_name(main_parameter(trainer)),
                generator_dtype=dtype_name(main_parameter(generator)),
                rows=len(target),
                choices=target.shape[-1] if target.dim() == 2 else 1,
                largest_gap=float(gaps.max()),
                mean_gap=float(gaps.mean()),
                trainer_autocast=ours.autocast,
                generator_autocast=theirs.autocast,
                moved=float(moved.max()),
                apart=float(apart.max()),
            )
            at = (self.position.step, self.position.call)
            self._found.append(_Found(twins, ours.model, theirs.model, versions_of(generator), at, self.position.phase))
        return True

    def _tell_of(self, settled: list[_Found]) -> None:
        for found in settled:
            self._found.remove(found)
            with self.position.aside():
                is_of_average = found.is_of_average()
            if not is_of_average:
                self.session.emit(found.twins, at=found.at, phase=found.phase)

    def _number(self, module: nn.Module) -> int | None:
        place = self.names.find(module)
        return place[0] if place is not None else None


def tokens_given(args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tokens (rows, length) that a model is called on: ``input_ids``, or the first tensor of whole numbers.

    None where the output depends on what stands in the place of tokens, or on what has no name beside them: noise, of which the whole numbers are the time
    steps. Images have names.
    """
    content = {name for name, value in (*enumerate(args), *kwargs.items()) if _is_content(name, value)}
    if not content <= kwargs.keys() - _INSTEAD:
        return None
    named = kwargs.get("input_ids")
    found = next((value for value in (named, *args, *kwargs.values()) if _is_tokens(value)), None)
    return None if found is None or (content and named is None) else found.detach().reshape(len(found), -1)


def counted_among(tokens: Tensor, mask: Any) -> Tensor:
    """Which tokens are no padding, by the attention mask; all without one."""
    is_of_them = isinstance(mask, Tensor) and mask.shape == tokens.shape
    return mask.bool() if is_of_them else torch.ones_like(tokens).bool()


def _is_content(name: object, value: Any) -> bool:
    """Whether an argument says something that is not in the tokens."""
    if name == "encoder_outputs":
        return value is not None
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1 and "mask" not in str(name)


def _is_tokens(value: Any) -> bool:
    is_whole = isinstance(value, Tensor) and value.dtype in (torch.int64, torch.int32)
    return is_whole and value.dim() > 0 and 0 < value.numel() <= LARGEST_INPUT


def _log_probabilities(output: Any, tokens: Tensor, mask: Tensor) -> Tensor | None:
    """Of some places of a call that count: those of all choices (places, choices), or of the tokens themselves (places); None where it outputs neither."""
    rows, length = tokens.shape
    found = next((tensor for _, tensor in tensors_in(output) if tensor.dim() >= 2 and len(tensor) == rows), None)
    if found is None or not _may_be_scores(found):
        return None

    # log-probabilities of the tokens themselves
    if found.dim() == 2 and length > 2 and found.shape[1] in (length, length - 1):
        return found[mask[:, -found.shape[1] :]].float() if bool((found <= 0).all()) else None

    return _of_choices(found.reshape(rows, -1, found.shape[-1]), mask).float().log_softmax(-1)


def _may_be_scores(output: Tensor) -> bool:
    return output.is_floating_point() and output.shape[-1] > 1


def _of_choices(scores: Tensor, mask: Tensor) -> Tensor:
    """The scores (places, choices) at some of the places that count."""
    every = max(1, scores.shape[1] // PLACES)
    scores = scores[: max(1, DISTRIBUTIONS // min(PLACES, scores.shape[1])), ::every]
    counted = mask[: len(scores), ::every]
    return scores[counted] if counted.shape == scores.shape[:2] else scores.flatten(0, 1)


def _gaps(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Differences of log-probabilities of what is likely enough; None where there are none."""
    if one is None or other is None or one.shape != other.shape:
        return None
    counted = (one < 0) & (other < 0)  # 0 is what stands for a token that is not scored
    gaps = (one - other).abs()[counted & (one > LIKELY) if one.dim() == 2 else counted]
    return gaps if gaps.numel() and bool(gaps.isfinite().all()) else None


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by the names that they have without wrappers, and without adapters."""
    named = named_tensors(model, buffers=False)
    return {
        _plain(name): parameter
        for name, parameter in named
        if not is_lazy(parameter) and not any(part in name for part in _ADAPTERS)
    }


def _plain(name: str) -> str:
    """The name of a parameter without those of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def main_parameter(model: nn.Module) -> Tensor:
    """A parameter of the dtype that most elements have."""
    sizes: Counter[torch.dtype] = Counter()
    for parameter in parameters_in(model):
        sizes[parameter.dtype] += parameter.numel()
    [(most, _)] = sizes.most_common(1)
    return next(parameter for parameter in parameters_in(model) if parameter.dtype is most)


def _same_weights(one: nn.Module, other: nn.Module, *, exactly: bool = False) -> bool:
    """Whether the weights of one model are those of the other, but for rounding to the narrower dtype; judged by a few elements of each."""
    ours, theirs = _weights(one), _weights(other)
    if ours.keys() != theirs.keys() or not all(map(measurable, (*ours.values(), *theirs.values()))):
        return False
    same = []
    for name, parameter in ours.items():
        few = [each.detach().reshape(-1) for each in (parameter, theirs[name])]
        few = [flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS] for flat in few]
        narrow, wide = sorted(few, key=lambda each: -torch.finfo(each.dtype).eps)
        rounded = wide.to(narrow.dtype).float()
        close = 0.0 if exactly or wide.dtype in (narrow.dtype, torch.float32) else torch.finfo(narrow.dtype).eps
        same.append(((rounded - narrow.to(rounded.device).float()).abs() <= close * rounded.abs()).all())
    return bool(same) and bool(torch.stack([each.to(same[0].device) for each in same]).all())


def versions_of(model: nn.Module) -> int:
    """Changes with each write to a parameter."""
    return sum(version_of(parameter) + parameter.data_ptr() for parameter in parameters_in(model))


def _in_the_dtypes_of(model: nn.Module, other: nn.Module) -> dict[str, Tensor] | None:
    """The parameters and buffers of ``model`` that have another dtype than those of ``other``, cast to it; None where that takes too much memory."""
    wanted = {_plain(name): tensor.dtype for name, tensor in _state(other)}
    narrow = main_parameter(other).dtype
    return _cast(model, {name: wanted.get(_plain(name), narrow) for name, _ in _state(model)})


def in_dtype(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """The parameters and buffers of ``model`` that have another dtype, cast to ``dtype``; None where that takes too much memory."""
    return _cast(model, {name: dtype for name, _ in _state(model)})


def _cast(model: nn.Module, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor] | None:
    casts = {
        name: tensor.detach()
        for name, tensor in _state(model)
        if tensor.is_floating_point() and tensor.dtype is not dtypes[name]
    }
    if not fits(sum(t.numel() * dtypes[name].itemsize for name, t in casts.items()), main_parameter(model).device):
        return None
    return {name: tensor.to(dtypes[name]) for name, tensor in casts.items()}


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from named_tensors(model, buffers=False)
    yield from named_tensors(model, buffers=True)


@contextmanager
def beside(session: Session, model: nn.Module, given: Any, device: str, autocast: str | None) -> Iterator[None]:
    """Inside, calls of ``model`` on what is ``given`` leave the program as it was.

    They are made without gradients and dropout, in another region of autocast.

    Raises:
        CannotReplayError: they would change the program.
    """
    if not all(map(_is_plain, (*given[0], *given[1].values()))):
        raise CannotReplayError("a cache or an iterator is among the arguments")
    regions = () if autocast is None else (AutocastState(device=device, dtype=getattr(torch, autocast)),)
    call = replace(LiveCall.entered(model, "", *given), grad=False, training=False, autocast=regions)
    memory = KeptMemory()
    # muted, but the program's own code: it may reach nothing outside of the process
    with undone(session, (model, given), session.position.mute(), memory, lambda: True), call.modes(), memory:
        yield
    if memory.why_not:
        raise CannotReplayError(memory.why_not)


def _is_plain(value: Any) -> bool:
    """Whether an argument is the same when the call is made again: no cache, no iterator."""
    if isinstance(value, Tensor):
        return value.numel() <= LARGEST_INPUT and not value.requires_grad
    return isinstance(value, _PLAIN)
