"""Two models of the same weights in one program that compute in different dtypes: a policy and its reference, or its generator.

What one model outputs for some rows of tokens is kept until the other is called on the same rows, in whatever order and in whatever batches. Where the two
differ although their weights are the same, the wider one is called once more in the dtype of the other: if the difference is gone then, the dtype made it.
"""

import math
import re
from collections import deque
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from dtypedoctor._torch_private import version_of
from dtypedoctor.instrument.contents import tensors_in
from dtypedoctor.instrument.module_tree import ByModule, modules_in, named_tensors, parameters_in
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.operators import bytes_of, fits
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.silent.merging import Added, added_by_adapters
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.silent.policies import is_random
from dtypedoctor.instrument.statistics import measurable
from dtypedoctor.instrument.untouched import CannotReplayError, KeptMemory, undone
from dtypedoctor.interruptions import contained
from dtypedoctor.trace.events import NOT_SEEN
from dtypedoctor.trace.records.silent import MovedTwin, Twins

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

__all__ = ["Asked", "TwinCheck", "beside", "in_dtype", "made_again", "main_parameter", "question_of", "versions_of"]

DISTRIBUTIONS = 64
"""Distributions of a call that are kept for comparison."""
PLACES = 16
"""Positions of a row at which they are kept."""
MOST_KEPT = 32 << 20
"""Bytes that are kept of the calls of one model; the oldest calls are forgotten first."""
ALONE = 32
"""Calls of a model that are kept before there is another one of its shapes."""
ATTEMPTS = 8
"""Calls that are compared of a pair of models; each waits for the device."""
ELEMENTS = 8
"""Elements of each parameter by which weights are recognised as the same."""
LARGEST_INPUT = 1_000_000
"""Elements of an input that is kept to be recognised."""
CONTENT = 256
"""Elements of an image, or other content beside tokens, by which it is recognized."""
LIKELY = math.log(1e-3)
"""Log-probability below which a choice is too unlikely to matter."""
SAME_OUTPUT = 1e-5
"""Largest difference of log-probabilities that is none."""
_INSTEAD = frozenset({"encoder_outputs", "inputs_embeds"})
"""Content that stands in the place of tokens."""
_NOT_THE_SAME = (
    f"{NOT_SEEN} they were not called on the same tokens and images (or other content) of a row, or of a whole batch where images belong to no row; "
    "use one dtype for both, or a batch of one row"
)
_WRAPPERS = ("_orig_mod.", "module.", "base_model.model.", "base_layer.", "original_module.")
"""What compilers, DDP and peft put into the names of parameters."""
_ADAPTERS = ("lora_", "modules_to_save.")
_SECOND_FACTOR = re.compile(r"lora_B\.[^.]+")
"""In the name of a parameter of LoRA that is 0 as long as the adapter changes nothing; with the adapter's name."""
_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


@dataclass(slots=True, eq=False)
class Asked:
    """A call of a model on rows of tokens.

    Attributes:
        model: that was called.
        args, kwargs: what with; empty unless the call can be made again.
        repeatable: whether it can.
        question: the tokens (rows, length).
        mask: which of them count, of the same shape.
        content: by which what is beside the tokens, images say, is recognized (rows, elements); None where nothing is.
        output: log-probabilities of the tokens themselves (rows, places), or scores of all choices (rows, places, choices).
        trained: whether a gradient can come back.
        autocast: the region that it was made in.
        versions: of the parameters, by which it is known whether they have changed since.
    """

    model: ReferenceType[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    repeatable: bool
    question: Tensor
    mask: Tensor
    content: Tensor | None
    output: Tensor
    trained: bool
    autocast: str | None
    versions: int

    @classmethod
    def of(cls, session: Session, module: nn.Module, args: Any, kwargs: Any, output: Any) -> "Asked | None":
        """The call of ``module`` that has returned ``output``; None where it was asked for no tokens, or answers with no scores."""
        question = question_of(args, kwargs)
        found = _output(output, question) if question is not None else None
        if question is None or found is None:
            return None
        mask = kwargs.get("attention_mask")
        repeatable = all(map(_is_plain, (*args, *kwargs.values())))
        return cls(
            ref(module),
            tuple(args) if repeatable else (),
            dict(kwargs) if repeatable else {},
            repeatable,
            question,
            _counted_tokens(mask, question),
            _content_of(kwargs, len(question)),
            found.detach(),
            found.requires_grad,
            session.autocast.dtype(question.device.type),
            versions_of(module),
        )

    def is_old(self) -> bool:
        """Whether the model is gone, or has other weights by now."""
        model = self.model()
        return model is None or versions_of(model) != self.versions

    def size(self) -> int:
        """Bytes that it keeps alive."""
        given = [value for value in (*self.args, *self.kwargs.values()) if isinstance(value, Tensor)]
        content = [self.content] if self.content is not None else []
        return bytes_of([self.output, self.question, self.mask, *content, *given])


@dataclass(slots=True, eq=False)
class _Family:
    """Models whose parameters have the same names and shapes."""

    models: dict[int, ReferenceType[nn.Module]] = field(default_factory=dict)
    """Those of which calls have been kept, by identity; the same keys below."""
    calls: dict[int, deque[Asked]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    pairs: dict[tuple[int, int], int] = field(default_factory=dict)
    """Attempts that are left to compare two models."""
    beside: dict[int, "_Beside"] = field(default_factory=dict)
    """Those that were called on more than tokens."""

    def forget_dead(self) -> None:
        """Lets go of what is kept of models that are gone."""
        for number in [number for number, model in self.models.items() if model() is None]:
            del self.models[number], self.calls[number]
            self.counts.pop(number, None)
            self.pairs = {pair: left for pair, left in self.pairs.items() if number not in pair}

    def is_alone(self, model: nn.Module) -> bool:
        """Whether only ``model`` of this family is alive."""
        self.forget_dead()
        return not set(self.models) - {id(model)}

    def is_settled(self, model: nn.Module) -> bool:
        """Whether ``model`` will not be compared with any other one again."""
        number = id(model)
        others = (other for other in self.models if other != number)
        return all(self.pairs.get((min(number, other), max(number, other)), ATTEMPTS) <= 0 for other in others)


@dataclass(slots=True, eq=False)
class _Beside:
    """A model that was called on more than tokens: itself, its class, the dtype of its weights, and whether it is trained."""

    model: ReferenceType[nn.Module]
    cls: str
    dtype: str
    trained: bool = False


class TwinCheck(Observer):
    """Writes a :class:`Twins` for two models of the same weights that are called on the same tokens and compute in different dtypes."""

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._families: dict[int, _Family] = {}
        self._likeness: ByModule[int] = ByModule()
        self._found: list[_Found] = []

    def returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """An outermost call has returned."""
        if self.position.backward_depth or self.position.phase == "generate":
            return
        question = question_of(args, kwargs)
        content = {name for name, value in kwargs.items() if _is_content(name, value)}
        if content and (question is not None or content & _INSTEAD):
            self._note_content(module, output)
        if question is None:
            return
        family = self._families.setdefault(self._like(module), _Family())
        alone = family.is_alone(module)
        number = id(module)
        family.counts[number] = family.counts.get(number, 0) + 1
        if alone and family.counts[number] > ALONE:
            family.calls.get(number, deque[Asked]()).clear()
            return
        with self.position.mute(), torch.no_grad():
            self._look_whether_moved(module)
            if not alone and family.is_settled(module):
                family.calls.get(number, deque[Asked]()).clear()
                return
            call = Asked.of(self.session, module, args, kwargs, output)
            if call is None:
                return
            if not alone:
                self._compare_with_others(family, module, call)
            family.models[number] = ref(module)
            kept = family.calls.setdefault(number, deque())
            kept.append(_only_a_part(call))
            while len(kept) > 1 and sum(each.size() for each in kept) > MOST_KEPT:
                kept.popleft()

    def _note_content(self, module: nn.Module, output: Any) -> None:
        """A language model was called on more than tokens."""
        beside = self._families.setdefault(self._like(module), _Family()).beside
        known = beside.get(id(module))
        if known is None or known.model() is not module:
            if next(parameters_in(module), None) is None:
                return
            known = beside[id(module)] = _Beside(ref(module), type(module).__name__, dtype_name(main_parameter(module)))
        known.trained = known.trained or any(tensor.requires_grad for _, tensor in tensors_in(output))

    def stop(self) -> None:
        """The program has ended: a reference in another dtype that was never called on what the trained model was is named."""
        for family in self._families.values():
            for (one, ours), (other, theirs) in combinations(family.beside.items(), 2):
                settled = family.pairs.get((min(one, other), max(one, other)), 1) <= 0
                if ours.trained != theirs.trained and ours.dtype != theirs.dtype and not settled:
                    trained, fixed = (ours, theirs) if ours.trained else (theirs, ours)
                    what = f"{trained.cls} in {trained.dtype} against one of the same shapes in {fixed.dtype} that is not trained"
                    self.session.guard.tell(what, _NOT_THE_SAME)

    def _like(self, module: nn.Module) -> int:
        """Equal for models whose parameters have the same names and shapes, apart from adapters."""
        known = self._likeness.get(module)
        if known is None:
            shapes = {name: parameter.shape for name, parameter in _weights(module).items()}
            known = self._likeness[module] = hash(tuple(sorted(shapes.items())))
            for family in self._families.values():
                family.forget_dead()
        return known

    def _compare_with_others(self, family: _Family, module: nn.Module, call: Asked) -> None:
        for number, calls in family.calls.items():
            if number == id(module):
                continue
            pair = (min(number, id(module)), max(number, id(module)))
            if family.pairs.setdefault(pair, ATTEMPTS) <= 0:
                continue
            family.pairs[pair] -= 1
            if any(self._is_settled(call, other) for other in reversed(calls)):
                family.pairs[pair] = 0

    def _is_settled(self, call: Asked, before: Asked) -> bool:
        """Whether the two calls had rows in common; then what they show is written."""
        if before.is_old() or before.output.dim() != call.output.dim():
            return False
        if not call.trained and not before.trained:
            return False
        gaps = _gaps(call, before)
        if gaps is None or not gaps.numel() or not bool(gaps.isfinite().all()):
            return False  # NaN or a masked choice on one side: there is no distance to tell
        if float(gaps.max()) > SAME_OUTPUT:
            self._tell(*_trained_first(call, before), gaps)
        return True

    def _tell(self, ours: Asked, theirs: Asked, gaps: Tensor) -> None:
        trainer, generator = ours.model(), theirs.model()
        if trainer is None or generator is None:
            return
        merged = not _same_weights(trainer, generator)
        if merged and not _is_merged(*_adapted_first(trainer, generator)):
            return
        moved, apart = self._in_one_dtype(ours, theirs, merged=merged)
        compared = Twins(
            trainer=_number(self.names, trainer),
            generator=_number(self.names, generator),
            trainer_dtype=dtype_name(main_parameter(trainer)),
            generator_dtype=dtype_name(main_parameter(generator)),
            rows=gaps.shape[0],
            choices=ours.output.shape[-1] if ours.output.dim() == 3 else 1,
            largest_gap=float(gaps.max()),
            mean_gap=float(gaps.mean()),
            dropout=any(map(is_random, (*modules_in(trainer), *modules_in(generator)))),
            trainer_autocast=ours.autocast,
            generator_autocast=theirs.autocast,
            moved=moved,
            apart=apart,
            merged=merged,
        )
        self.session.once(compared, (compared.trainer, compared.generator))
        self._found.append(_Found(ours.model, theirs.model, self.position.step, versions_of(generator)))

    def _in_one_dtype(self, ours: Asked, theirs: Asked, *, merged: bool) -> tuple[float, float] | tuple[None, None]:
        """How far one model's log-probabilities move in the other's dtype, and how far they are from the other's then; nothing where that cannot be
        measured. It is the wider one; of a model with adapters and one that has them ``merged``, the former with its own merged."""
        again, kept = _in_order(ours, theirs, merged=merged)
        model, other = again.model(), kept.model()
        if model is None or other is None or not again.repeatable:
            return None, None
        weights = _in_the_dtypes_of(model, other, merged=merged)
        if weights is None or (not weights and again.autocast == kept.autocast):
            return None, None  # what differs is inside of the call
        as_it_is = made_again(self.session, model, again, {}, again.autocast)
        in_its_dtype = made_again(self.session, model, again, weights, kept.autocast)
        moved, apart = _largest_gap(as_it_is, in_its_dtype), _largest_gap(in_its_dtype, kept)
        return (None, None) if moved is None or apart is None else (moved, apart)

    def _look_whether_moved(self, module: nn.Module) -> None:
        """Tells of a generator that is an average of the policy: the first optimizer step has changed it, and not to the policy's weights."""
        for found in list(self._found):
            trainer, generator = found.trainer(), found.generator()
            if trainer is None or generator is None:
                self._found.remove(found)
            elif generator is module and self.position.step > found.step:
                self._found.remove(found)
                if found.versions != versions_of(generator) and not _same_weights(trainer, generator, exactly=True):
                    numbers = _number(self.names, trainer), _number(self.names, generator)
                    self.session.once(MovedTwin(trainer=numbers[0], generator=numbers[1]), numbers)


@dataclass(frozen=True, slots=True)
class _Found:
    """A pair that has been written, to be looked at once more after the first optimizer step."""

    trainer: ReferenceType[nn.Module]
    generator: ReferenceType[nn.Module]
    step: int
    versions: int


def _trained_first(one: Asked, other: Asked) -> tuple[Asked, Asked]:
    """The call of the trained model, and that of the other; where both could be, the one that is in training mode."""
    model = one.model()
    if one.trained != other.trained:
        return (one, other) if one.trained else (other, one)
    return (one, other) if model is not None and model.training else (other, one)


def _in_order(one: Asked, other: Asked, *, merged: bool) -> tuple[Asked, Asked]:
    """The call that is made again, and the other: the one of the wider model, or of that with adapters which the other has ``merged``."""
    if merged:
        model = one.model()
        return (one, other) if model is not None and _second_factors(model) else (other, one)
    wide, narrow = sorted((one, other), key=lambda call: (-_width(call), not call.repeatable))
    return wide, narrow


def _largest_gap(one: Asked | None, other: Asked | None) -> float | None:
    gaps = _gaps(one, other) if one is not None and other is not None else None
    largest = float(gaps.max()) if gaps is not None and gaps.numel() else math.inf
    return largest if math.isfinite(largest) else None


def _number(names: Any, module: nn.Module | None) -> int | None:
    place = names.find(module) if module is not None else None
    return place[0] if place is not None else None


def question_of(args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The tokens (rows, length) among the arguments: ``input_ids`` (and what goes to a decoder), or the first tensor of whole numbers.

    None where the output depends on what may not stand beside tokens: on noise of which the whole numbers are the time steps, on embeddings. Images may.
    """
    if not _is_about_text(args, kwargs):
        return None
    found = _tokens_by_name(kwargs)
    if not found:
        found = [value for value in (*args, *kwargs.values()) if _is_tokens(value)][:1]
    if len({len(tensor) for tensor in found}) != 1:
        return None
    rows = [tensor.detach().reshape(len(tensor), -1) for tensor in found]
    return torch.cat(rows, -1) if len(rows) > 1 else rows[0]


def _is_about_text(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether there is nothing beside tokens, or what has names, none of those that stand for tokens, and comes with the tokens of a text."""
    content = [name for name, value in (*enumerate(args), *kwargs.items()) if _is_content(name, value)]
    named = all(isinstance(name, str) for name in content) and _INSTEAD.isdisjoint(content)
    text = (*args[:1], kwargs.get("input_ids"))
    return not content or (named and any(_is_tokens(each) and each.dim() == 2 for each in text))


def _tokens_by_name(kwargs: Mapping[str, Any]) -> list[Tensor]:
    found = [kwargs[name] for name in ("input_ids", "decoder_input_ids") if _is_tokens(kwargs.get(name))]
    labels = kwargs.get("labels")
    if len(found) == 1 and isinstance(labels, Tensor) and _is_tokens(labels) and labels.shape != found[0].shape:
        found.append(labels)  # what the decoder gets is made of them
    return found


def _is_content(name: object, value: Any) -> bool:
    """Whether an argument says something that is not in the tokens."""
    if name == "encoder_outputs":
        return value is not None
    if isinstance(value, list):  # of images of several sizes; caches are tuples
        return any(_is_content(name, each) for each in value)
    return isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 1 and "mask" not in str(name)


def _content_of(kwargs: Mapping[str, Any], rows: int) -> Tensor | None:
    """Some elements of what stands beside the tokens, as bfloat16 has them, so that a model which casts them is told the same; of each row, where they belong to rows."""
    found = []
    for name in sorted(name for name, value in kwargs.items() if _is_content(name, value)):
        for _, tensor in tensors_in(kwargs[name]):
            parts = tensor.detach().reshape(rows if len(tensor) == rows else 1, -1)
            some = parts[:, :: max(1, parts.shape[1] // CONTENT)][:, :CONTENT]
            found.append(some.to(torch.bfloat16).contiguous().view(torch.int16).expand(rows, -1))
    return torch.cat(found, 1) if found else None


def _counted_tokens(mask: Any, question: Tensor) -> Tensor:
    """Which tokens are no padding, by the attention mask; all without one."""
    if isinstance(mask, Tensor) and mask.shape == question.shape:
        return mask.bool()
    return torch.ones_like(question).bool()


def _is_tokens(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype in (torch.int64, torch.int32)
        and value.dim() > 0
        and 0 < value.numel() <= LARGEST_INPUT
    )


def _is_plain(value: Any) -> bool:
    """Whether an argument is the same when the call is made again: no cache, no iterator."""
    if isinstance(value, Tensor):
        return value.numel() <= LARGEST_INPUT and not value.requires_grad
    return isinstance(value, _PLAIN)


def _output(output: Any, question: Tensor) -> Tensor | None:
    """Log-probabilities of the tokens themselves (rows, places), or scores of several choices (rows, places, choices)."""
    rows, length = question.shape
    found = next((tensor for _, tensor in tensors_in(output) if tensor.dim() >= 2 and len(tensor) == rows), None)
    if found is None or not found.is_floating_point() or found.shape[-1] < 2:
        return None
    if found.dim() == 2 and length > 2 and found.shape[1] in (length, length - 1):
        return found
    return found.reshape(rows, -1, found.shape[-1])


def _only_a_part(call: Asked) -> Asked:
    """Copies of what is compared of a call, so that the rest can be freed: of distributions :data:`DISTRIBUTIONS`."""
    rows = len(call.output)
    if call.output.dim() == 3:
        rows = max(1, DISTRIBUTIONS // min(PLACES, call.output.shape[1]))
    call.question, call.mask = call.question[:rows].clone(), call.mask[:rows].clone()
    call.content = call.content[:rows].clone() if call.content is not None else None
    call.output = _at_places(call.output[:rows]).clone()
    return call


def _at_places(output: Tensor) -> Tensor:
    """Some positions of each row, where each has a distribution of its own; the same ones for every call of that length."""
    if output.dim() == 2 or output.shape[1] <= PLACES:
        return output
    return output[:, -(output.shape[1] // PLACES) * PLACES :: output.shape[1] // PLACES]


def _gaps(one: Asked, other: Asked) -> Tensor | None:
    """Differences of the log-probabilities of the rows that both calls have; None where they have none in common. Waits for the device."""
    theirs = {tokens: row for row, tokens in enumerate(_rows(other))}
    pairs = [(row, theirs[tokens]) for row, tokens in enumerate(_rows(one)) if tokens in theirs]
    gaps = [gap for mine, its in pairs if (gap := _gap(one, mine, other, its)) is not None]
    return torch.cat(gaps) if gaps else None


def _rows(call: Asked) -> Iterator[tuple[int, ...]]:
    """The tokens of each row and what stands beside them; where those of single tokens are compared, without padding, of which another batch has another amount."""
    beside = call.content.tolist() if call.content is not None else [[]] * len(call.question)
    for tokens, counts, content in zip(call.question.tolist(), call.mask.tolist(), beside, strict=True):
        if call.output.dim() == 3:
            yield (*tokens, *content)
        else:
            yield (*(token for token, counted in zip(tokens, counts, strict=True) if counted), *content)


def _gap(one: Asked, row: int, other: Asked, its: int) -> Tensor | None:
    if one.output.dim() == 2:
        mine, theirs = _of_tokens(one, row), _of_tokens(other, its)
        length = min(len(mine), len(theirs))
        mine, theirs = mine[len(mine) - length :], theirs[len(theirs) - length :]
        theirs = theirs.to(mine.device)
        scored = (mine < 0) & (theirs < 0)  # 0 is what stands for a token that is not scored
        return (mine - theirs).abs()[scored] if bool((mine <= 0).all()) else None
    mine, theirs = _at_places(one.output[row : row + 1])[0], _at_places(other.output[its : its + 1])[0]
    if mine.shape != theirs.shape:
        return None
    counted = _counted(one, row)
    mine, theirs = (scores.float().log_softmax(-1)[counted] for scores in (mine, theirs.to(mine.device)))
    return (mine - theirs).abs()[mine > LIKELY]


def _counted(call: Asked, row: int) -> Tensor:
    """Which of the compared positions are no padding; all where there are not as many positions as tokens."""
    places, length = call.output.shape[1], call.question.shape[1]
    if places != length or not bool(call.mask[row].any()):
        return torch.ones(min(places, len(_at_places(call.output[row : row + 1])[0])), dtype=torch.bool)
    return _at_places(call.mask[row : row + 1, :, None])[0, :, 0].to(call.output.device)


def _of_tokens(call: Asked, row: int) -> Tensor:
    mask = call.mask[row][-call.output.shape[1] :]
    return call.output[row][mask].float()


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by the names that they have without wrappers, and without adapters."""
    found: dict[str, Tensor] = {}
    for name, parameter in named_tensors(model, buffers=False):
        if is_lazy(parameter) or any(part in name for part in _ADAPTERS):
            continue
        found[_plain(name)] = parameter
    return found


def _plain(name: str) -> str:
    """The name of a parameter without those of wrappers."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def main_parameter(model: nn.Module) -> Tensor:
    """A parameter of the dtype that most elements have."""
    sizes: dict[torch.dtype, int] = {}
    for parameter in parameters_in(model):
        sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + parameter.numel()
    most = max(sizes, key=lambda dtype: sizes[dtype])
    return next(parameter for parameter in parameters_in(model) if parameter.dtype is most)


def _width(call: Asked) -> int:
    """Bits that the model of a call computes with, more or less: of its parameters, halved by a region of autocast."""
    model = call.model()
    if model is None:
        return 0
    width = torch.finfo(main_parameter(model).dtype).bits if main_parameter(model).is_floating_point() else 8
    return width * 2 - (call.autocast is not None)


def _same_weights(one: nn.Module, other: nn.Module, *, exactly: bool = False) -> bool:
    """Whether the weights of one model are those of the other, but for rounding to the narrower dtype; judged by a few elements of each."""
    ours, theirs = _weights(one), _weights(other)
    if ours.keys() != theirs.keys():
        return False
    pairs = [(ours[name], theirs[name]) for name in ours] + _pairs_of_adapters(one, other)
    if not all(measurable(weight) for pair in pairs for weight in pair):
        return False
    same = [_is_rounded(_few(mine), _few(its), exactly=exactly) for mine, its in pairs]
    return bool(torch.stack([each.to(same[0].device) for each in same]).all()) if same else False


def _is_rounded(mine: Tensor, its: Tensor, *, exactly: bool) -> Tensor:
    """Whether the narrower of two pieces of a weight is the wider one, rounded; does not wait for the device."""
    narrow, wide = sorted((mine, its), key=lambda few: -torch.finfo(few.dtype).eps)
    rounded = wide.to(narrow.dtype).float()
    close = 0.0 if exactly or wide.dtype in (narrow.dtype, torch.float32) else torch.finfo(narrow.dtype).eps
    return ((rounded - narrow.to(rounded.device).float()).abs() <= close * rounded.abs()).all()


def _pairs_of_adapters(one: nn.Module, other: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The second factors of LoRA in the two models, zeros for one that has none: an adapter of zeros changes nothing."""
    ours, theirs = _second_factors(one), _second_factors(other)
    pairs = []
    for name in {**ours, **theirs}:
        known = ours[name] if name in ours else theirs[name]
        nothing = torch.zeros_like(known)
        pairs.append((ours.get(name, nothing), theirs.get(name, nothing)))
    return pairs


def _second_factors(model: nn.Module) -> dict[str, Tensor]:
    found = ((name, weight) for name, weight in named_tensors(model, buffers=False) if _SECOND_FACTOR.search(name))
    return {_SECOND_FACTOR.sub("lora_B", _plain(name)): weight for name, weight in found}


def _adapted_first(one: nn.Module, other: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The model that has adapters, if only one has."""
    return (one, other) if _second_factors(one) else (other, one)


def _is_merged(adapted: nn.Module, plain: nn.Module) -> bool:
    """Whether the weights of ``plain`` are those of ``adapted`` with its adapters added, but for rounding; judged by a few elements of each."""
    ours, theirs = _weights(adapted), _weights(plain)
    if ours.keys() != theirs.keys() or _second_factors(plain):
        return False
    if not all(map(measurable, (*ours.values(), *theirs.values()))):
        return False
    sums, rest = _compared(ours, theirs, dict(added_by_adapters(adapted)))
    return any(bool(differs) for _, differs in sums) and all(map(bool, (*rest, *(same for same, _ in sums))))


def _compared(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], layers: dict[str, Added]
) -> tuple[list[tuple[Tensor, Tensor]], list[Tensor]]:
    """What :func:`_is_sum` says of the weights that adapters of ``layers`` are added to, and whether each of the rest is the other, but for rounding."""
    added = {_plain(f"{layer}.weight"): what for layer, what in layers.items()}
    sums = [_is_sum(ours[name], what, theirs[name]) for name, what in added.items() if name in ours]
    rest = ours.keys() - added.keys()
    return sums, [_is_rounded(_few(ours[name]), _few(theirs[name]), exactly=False) for name in rest]


def _is_sum(weight: Tensor, added: Added, merged: Tensor) -> tuple[Tensor, Tensor]:
    """Whether a weight is another one and what is added to it, but for rounding each; and whether it is not the other alone; judged by a few elements."""
    eps = max(torch.finfo(weight.dtype).eps, torch.finfo(merged.dtype).eps)
    base, whole = (_few(each).float().to(weight.device) for each in (weight, merged))
    more = added.at(_places(weight)).to(weight.device)
    close = 2 * eps * (base.abs() + more.abs())
    return ((base + more - whole).abs() <= close).all(), ((base - whole).abs() > close).any()


def _few(parameter: Tensor) -> Tensor:
    flat = parameter.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS]


def _places(parameter: Tensor) -> Tensor:
    """The numbers of the elements of which :func:`_few` consists."""
    step = max(1, parameter.numel() // ELEMENTS)
    return torch.arange(0, parameter.numel(), step, device=parameter.device)[:ELEMENTS]


def versions_of(model: nn.Module) -> int:
    """Changes with each write to a parameter."""
    return sum(version_of(parameter) + parameter.data_ptr() for parameter in parameters_in(model))


def _in_the_dtypes_of(model: nn.Module, other: nn.Module, *, merged: bool) -> dict[str, Tensor] | None:
    """The parameters and buffers of ``model`` that have another dtype than those of ``other``, cast to it, or with adapters ``merged`` before; None where
    that takes too much memory."""
    wanted = {_plain(name): tensor.dtype for name, tensor in _state(other)}
    narrow = main_parameter(other).dtype
    dtypes = {name: wanted.get(_plain(name), narrow) for name, _ in _state(model)}
    return _merged(model, dtypes) if merged else _cast(model, dtypes)


def _merged(model: nn.Module, dtypes: dict[str, torch.dtype]) -> dict[str, Tensor] | None:
    """The parameters and buffers cast to ``dtypes``, with adapters added before, which add nothing more."""
    added = {f"{layer}.base_layer.weight": what for layer, what in added_by_adapters(model)}
    weights = _cast(model, dtypes, anew=added)
    if weights is None:
        return None
    for name, parameter in named_tensors(model, buffers=False):
        if name in added:
            weights[name] = parameter.detach().float().add(added[name].whole()).to(dtypes[name])
        elif _SECOND_FACTOR.search(name):
            weights[name] = torch.zeros_like(parameter, dtype=dtypes[name])
    return weights


def in_dtype(model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor] | None:
    """The parameters and buffers of ``model`` that have another dtype, cast to ``dtype``; None where that takes too much memory."""
    return _cast(model, {name: dtype for name, _ in _state(model)})


def _cast(model: nn.Module, dtypes: dict[str, torch.dtype], anew: Container[str] = ()) -> dict[str, Tensor] | None:
    casts: dict[str, Tensor] = {}
    for name, tensor in _state(model):
        if tensor.is_floating_point() and (tensor.dtype is not dtypes[name] or name in anew):
            casts[name] = tensor.detach()
    if not fits(sum(t.numel() * dtypes[name].itemsize for name, t in casts.items()), main_parameter(model).device):
        return None
    return {name: tensor.to(dtypes[name]) for name, tensor in casts.items()}


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from named_tensors(model, buffers=False)
    yield from named_tensors(model, buffers=True)


def made_again(
    session: Session, model: nn.Module, call: Asked, weights: dict[str, Tensor], autocast: str | None
) -> Asked | None:
    """The call once more, without gradients and dropout, with other ``weights`` and in another region; None where it cannot be made."""
    question = result = None
    with contained(), beside(session, model, call, autocast):
        question = question_of(call.args, call.kwargs)
        answer = torch.func.functional_call(model, weights, call.args, call.kwargs)
        result = _output(answer, question) if question is not None else None
    if result is None or question is None:
        return None
    counted = _counted_tokens(call.kwargs.get("attention_mask"), question)
    content = _content_of(call.kwargs, len(question))
    return Asked(call.model, (), {}, False, question, counted, content, result.detach(), False, autocast, call.versions)


@contextmanager
def beside(session: Session, model: nn.Module, call: Asked, autocast: str | None) -> Iterator[None]:
    """Inside, calls of ``model``, of which ``call`` is one, leave the program as it was; they are made without dropout and in another region."""
    with _nothing_changes(session, model, call), _evaluating(model), _region(call.question.device.type, autocast):
        yield


@contextmanager
def _nothing_changes(session: Session, model: nn.Module, call: Asked) -> Iterator[None]:
    """Inside, a call of ``model`` leaves the program as it was."""
    memory = KeptMemory()
    # muted, but the program's own code: it may reach nothing outside of the process
    with undone(session, (model, call.args, call.kwargs), session.position.mute(), memory, lambda: True):
        memory.keep_buffers(model)
        with memory:
            yield
    if memory.why_not:
        raise CannotReplayError(memory.why_not)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Inside, nothing is dropped at random."""
    before = [(module, module.training) for module in modules_in(model)]
    try:
        for module, _ in before:
            module.training = False
        yield
    finally:
        for module, training in before:
            module.training = training


@contextmanager
def _region(device: str, dtype: str | None) -> Iterator[None]:
    """An autocast region that keeps no copies of weights: without gradients they would be of no use to the program."""
    kept = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.autocast(device, dtype=getattr(torch, dtype or "bfloat16"), enabled=dtype is not None):
            yield
    finally:
        torch.set_autocast_cache_enabled(kept)
