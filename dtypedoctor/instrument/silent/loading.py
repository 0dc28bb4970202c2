"""What is done to a model before it is first called: dtypes that loading changes; and what the state of an optimizer has lost on its way through a
checkpoint: bits, in ``load_state_dict``, or its small values, where it was stored in float16.
"""

import functools
import math
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtypedoctor._torch_private import follow_casts, parameters_of
from dtypedoctor.instrument.float32_program import HALF as NARROW
from dtypedoctor.instrument.float32_program import SMALL
from dtypedoctor.instrument.frames import local_of, own_statement, source_of
from dtypedoctor.instrument.module_tree import ByModule, named_tensors, owner_of, parameters_in
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.statistics import HALF, measurable
from dtypedoctor.trace.records.execution import (
    MomentsStoredInHalf,
    OptimizerStateCast,
    Pretrained,
    RoundedAndTrained,
    StateLoaded,
)
from dtypedoctor.unpatched import from_json, unseen_by_warnings

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks


LONGEST_HEADER = 100_000_000
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
               "F8_E5M2": "float8_e5m2"}  # fmt: skip
"""Floating-point dtypes by their names in the safetensors format (https://github.com/huggingface/safetensors)."""
MOST_NAMED = 5


@dataclass(frozen=True, slots=True)
class _Rounded:
    """A parameter that was given values of a dtype with more bits.

    Attributes:
        owner: the module that holds it; a tensor with a weak reference to it cannot be swapped for another, as ``Module.double()`` may do.
        attribute: its name there.
        name: its dotted name in the module that was loaded.
        change: sum of the relative changes of those elements that were rounded.
    """

    owner: ReferenceType[nn.Module]
    attribute: str
    name: str
    cast: str
    elements: int
    rounded: int
    change: float
    source: str | None

    def is_among(self, tensors: set[int]) -> bool:
        """Whether one of ``tensors``, by their identities, is the parameter."""
        owner = self.owner()
        return owner is not None and id(parameters_of(owner).get(self.attribute)) in tensors


_PRETRAINED = "transformers.modeling_utils"


class LoadingCheck(Observer):
    """Follows ``load_state_dict`` and transformers' ``from_pretrained`` while started.

    It writes a :class:`StateLoaded`, a :class:`Pretrained`, and a :class:`RoundedAndTrained` before the first step on such parameters.
    """

    waits_for = (_PRETRAINED,)

    between_looks: ClassVar[bool] = True

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._guard, self._originals = self.session.guard, checks.originals
        self._before: dict[str, Tensor] = {}
        self._rounding_lines: ByModule[dict[str, str]] = ByModule()
        self._unfollow: Callable[[], None] = lambda: None
        self._rounded: dict[tuple[int, str], _Rounded] = {}

    def start(self) -> None:
        """Begins to follow."""
        original = nn.Module.load_state_dict
        note = self._guard.shield(self._note_state, "what load_state_dict has cast")

        @functools.wraps(original)
        @unseen_by_warnings
        def load_state_dict(module: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            if not (args[1] if len(args) > 1 else kwargs.get("assign")):
                note(module, state_dict)
            return original(module, state_dict, *args, **kwargs)

        self.replace(nn.Module, "load_state_dict", load_state_dict)
        begin = self._guard.shield(self._before_cast, "what casting a module has rounded")
        end = self._guard.shield(self._after_cast, "what casting a module has rounded")
        self._unfollow = follow_casts(begin, end)

    def _before_cast(self, module: nn.Module) -> None:
        with self.position.aside():
            self._before = {
                n: t.detach().clone() for n, t in _small(module) if t.dtype in (torch.float32, torch.float64)
            }

    def _after_cast(self, module: nn.Module) -> None:
        before, self._before = self._before, {}
        with self.position.aside():
            line = _line_of_cast(module) if before else None
            for name, tensor in _small(module) if before else ():
                if name in before:
                    owner, attribute = owner_of(module, name)
                    self._originals.cast(before[name], tensor, owner, attribute)
                    if line is not None and tensor.dtype in NARROW:
                        self._rounding_lines.setdefault(owner, {})[attribute] = line

    def rounded_at(self, owner: nn.Module, name: str) -> str | None:
        """``file:line`` that last cast the small tensor ``name`` of ``owner`` from float32 to half precision; None where none is known.

        A cast back to float32 does not change that.
        """
        return (self._rounding_lines.get(owner) or {}).get(name)

    def stop(self) -> None:
        """Casts are not followed any more."""
        self._unfollow()

    def imported(self, module: str) -> None:
        """transformers is there: wraps ``from_pretrained``, which may run before any module is called."""
        owner = getattr(sys.modules.get(_PRETRAINED), "PreTrainedModel", None)
        if owner is None:
            return
        original = owner.__dict__["from_pretrained"]
        function = original.__func__
        note = self._guard.shield(self._note_pretrained, "the dtypes of some checkpoints")

        @functools.wraps(function)
        @unseen_by_warnings
        def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(cls, *args, **kwargs)
            note(result[0] if isinstance(result, tuple) else result, args, kwargs)
            return result

        self.replace(owner, "from_pretrained", classmethod(from_pretrained))

    def _note_state(self, module: nn.Module, state_dict: Mapping[str, Any]) -> None:
        own = {**dict(named_tensors(module, buffers=True)), **dict(named_tensors(module, buffers=False))}
        pairs = [(n, t, own[n]) for n, t in state_dict.items() if n in own and isinstance(t, Tensor)]
        cast = [(n, a, b) for n, a, b in pairs if measurable(a) and measurable(b) and a.dtype is not b.dtype]
        if not cast:
            return
        with self.position.aside():
            for name, a, b in cast:
                self._originals.cast(a, b, *owner_of(module, name))
        casts: Counter[str] = Counter()
        for _, a, b in cast:
            casts[f"{dtype_name(a)}->{dtype_name(b)}"] += a.numel()
        narrowed = [(n, a, b) for n, a, b in cast if torch.finfo(b.dtype).max < torch.finfo(a.dtype).max]
        with self.position.aside():
            lost = [_lost(a, b.dtype) for _, a, b in narrowed]
            self._note_rounded(module, cast)
        loaded = StateLoaded(
            casts=dict(casts),
            became_inf=sum(inf for inf, _ in lost),
            became_zero=sum(zero for _, zero in lost),
            elements=sum(a.numel() for _, a, _ in narrowed),
            names=[n for n, _, _ in narrowed[:MOST_NAMED]],
            source=_own_line(),
        )
        self.session.once(loaded, (type(module), *sorted(casts)))

    def _note_rounded(self, module: nn.Module, cast: list[tuple[str, Tensor, Tensor]]) -> None:
        for name, stored, own in cast:
            if torch.finfo(own.dtype).eps > torch.finfo(stored.dtype).eps:
                changed, change = _changed(stored, own.dtype)
                if changed:
                    about = f"{dtype_name(stored)}->{dtype_name(own)}"
                    owner, attribute = owner_of(module, name)
                    rounded = _Rounded(ref(owner), attribute, name, about, stored.numel(), changed, change, _own_line())
                    self._rounded[id(owner), attribute] = rounded

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: tells of what it trains and was rounded, once."""
        if not self._rounded:
            return
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        held = [found for found in self._rounded.values() if found.is_among(trained)]
        if not held:
            return
        self._rounded.clear()
        casts: Counter[str] = Counter()
        for found in held:
            casts[found.cast] += found.elements
        rounded = sum(found.rounded for found in held)
        told = RoundedAndTrained(
            casts=dict(casts),
            rounded=rounded,
            elements=sum(found.elements for found in held),
            parameters=len(held),
            names=[found.name for found in held[:MOST_NAMED]],
            mean_change=sum(found.change for found in held) / rounded,
            source=held[0].source,
        )
        self.session.once(told, tuple(sorted(casts)))

    def _note_pretrained(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        stored = stored_dtypes(args[0] if args else kwargs.get("pretrained_model_name_or_path"), kwargs)
        loaded: Counter[str] = Counter()
        for parameter in parameters_in(model):
            if parameter.is_floating_point():
                loaded[dtype_name(parameter)] += parameter.numel()
        if not stored or not loaded:
            return
        requested = kwargs.get("dtype", kwargs.get("torch_dtype"))
        asked = str(requested).removeprefix("torch.") if requested not in (None, "auto") else None
        found = Pretrained(
            model=type(model).__name__, stored=stored, loaded=dict(loaded), requested=asked, source=_own_line()
        )
        self.session.once(found, (type(model), *sorted(stored), *sorted(loaded)))


def _own_line() -> str | None:
    """``file:line`` of the program's own code that is at work, a trainer that resumes, say."""
    statement = own_statement(sys._getframe())
    return None if statement is None else statement.source


_CASTING_METHODS = frozenset({"to", "half", "bfloat16", "float", "double", "type"})


def _line_of_cast(module: nn.Module) -> str | None:
    """``file:line`` that asked for the cast of ``module`` at work; a method of the same name that passes it on, as transformers' ``to``, is skipped."""
    frame: FrameType | None = sys._getframe()
    asked = frame
    while frame is not None:
        code = frame.f_code
        if code.co_name in _CASTING_METHODS and code.co_argcount and local_of(frame, code.co_varnames[0]) is module:
            asked = frame.f_back
        frame = frame.f_back
    return source_of(asked)


def _small(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters and buffers of which a float32 copy costs nothing."""
    held = [*named_tensors(module, buffers=False), *named_tensors(module, buffers=True)]
    return [(name, tensor) for name, tensor in held if measurable(tensor) and tensor.numel() <= SMALL]


def _lost(tensor: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """How many elements a cast turns into inf, and how many into zero."""
    cast = tensor.detach().to(dtype)
    became_inf = cast.isinf() & tensor.isfinite()
    became_zero = cast.eq(0) & tensor.ne(0)
    inf, zero = torch.stack([became_inf.sum(), became_zero.sum()]).tolist()
    return int(inf), int(zero)


def _changed(tensor: Tensor, dtype: torch.dtype) -> tuple[int, float]:
    """How many finite elements a cast rounds, and the sum of their relative changes."""
    wide = tensor.detach()
    change = ((wide.to(dtype).to(wide.dtype) - wide) / wide).abs()
    change = change[change.isfinite() & change.ne(0)]
    return change.numel(), float(change.double().sum())


def stored_dtypes(name: Any, options: Mapping[str, Any]) -> dict[str, int]:
    """Elements by dtype in the safetensors files of a local folder or of the hub's cache; empty where there are none."""
    if name is None or options.get("subfolder") or options.get("state_dict") is not None:
        return {}
    folder = Path(str(name))
    if not folder.is_dir():
        cached = _cached(str(name), options.get("revision"))
        if cached is None:
            return {}
        folder = cached
    counts: Counter[str] = Counter()
    for file in sorted(folder.glob("*.safetensors")):
        counts.update(header_dtypes(file))
    return dict(counts)


def header_dtypes(file: Path) -> dict[str, int]:
    """Elements by floating-point dtype, from the header of a safetensors file: its length (8 bytes, little-endian), then JSON.

    Raises:
        ValueError: it is not such a file.
        OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else LONGEST_HEADER + 1
        if length > LONGEST_HEADER:
            raise ValueError(f"{file}: not a safetensors file")
        header = from_json(stream.read(length))
    counts: Counter[str] = Counter()
    for key, entry in header.items():
        if key != "__metadata__" and entry["dtype"] in SAFETENSORS:
            counts[SAFETENSORS[entry["dtype"]]] += math.prod(entry["shape"])
    return dict(counts)


def _cached(repository: str, revision: Any) -> Path | None:
    """The folder of a repository in the hub's cache, without asking the network."""
    hub = sys.modules.get("huggingface_hub")
    if hub is None:
        return None
    for name in ("model.safetensors", "model.safetensors.index.json"):
        found = hub.try_to_load_from_cache(repository, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None


COMPARED = 1 << 16
"""Elements of a tensor that are looked at."""
DISTINCT = 8
"""Different values that have to be exact in float16 before float32 numbers are taken to have been stored in it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """A tensor of an optimizer's state after loading. ``given`` is its dtype in the checkpoint; ``rounded`` counts the elements that the cast changed."""

    parameter: Tensor
    key: str
    tensor: Tensor
    given: torch.dtype
    rounded: int
    source: str | None

    @property
    def is_narrower(self) -> bool:
        """Whether it has fewer bits than what the checkpoint holds."""
        return self.tensor.dtype in HALF and torch.finfo(self.tensor.dtype).eps > torch.finfo(self.given).eps


class ResumeCheck(Observer):
    """Follows ``load_state_dict`` of optimizers while started.

    Before the first step after it, it writes an :class:`OptimizerStateCast` where the optimizer goes on with state that has fewer bits than the
    checkpoint, and a :class:`MomentsStoredInHalf` where second moments were rounded to zero or inf in float16. A program that puts the state back in
    between, or never steps with it, has lost nothing.
    """

    between_looks: ClassVar[bool] = True

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._loaded: WeakKeyDictionary[Optimizer, list[_Loaded]] = WeakKeyDictionary()

    def start(self) -> None:
        """Begins to follow."""
        original = Optimizer.load_state_dict
        note = self.session.guard.shield(self._note, "the dtypes of some optimizer states")

        @functools.wraps(original)
        @unseen_by_warnings
        def load_state_dict(optimizer: Optimizer, state_dict: Any) -> Any:
            result = original(optimizer, state_dict)
            note(optimizer, state_dict)
            return result

        self.replace(Optimizer, "load_state_dict", load_state_dict)

    def _note(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        with self.position.aside():
            self._loaded[optimizer] = list(_loaded(optimizer, state_dict))

    def before_step(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        loaded = self._loaded.pop(optimizer, None)
        if not loaded:
            return
        held = [one for one in loaded if optimizer.state.get(one.parameter, {}).get(one.key) is one.tensor]
        with self.position.aside():
            self._tell_of_casts(optimizer, [one for one in held if one.is_narrower and one.rounded])
            self._tell_of_moments(optimizer, held)

    def _tell_of_casts(self, optimizer: Optimizer, cast: list[_Loaded]) -> None:
        if not cast:
            return
        casts: Counter[str] = Counter()
        for one in cast:
            casts[f"{dtype_name(torch.empty(0, dtype=one.given))}->{dtype_name(one.tensor)}"] += one.tensor.numel()
        found = OptimizerStateCast(
            optimizer=type(optimizer).__name__,
            casts=dict(casts),
            keys=sorted({one.key for one in cast}),
            parameters=len({id(one.parameter) for one in cast}),
            rounded=sum(one.rounded for one in cast),
            compared=sum(len(_some(one.tensor)) for one in cast),
            source=cast[0].source,
        )
        self.session.once(found, type(optimizer).__name__)

    def _tell_of_moments(self, optimizer: Optimizer, held: list[_Loaded]) -> None:
        lost = _all_lost(held)
        if not lost:
            return
        found = MomentsStoredInHalf(
            optimizer=type(optimizer).__name__,
            keys=sorted({one.key for one, _ in lost}),
            parameters=len({id(one.parameter) for one, _ in lost}),
            became_zero=sum(zeros for _, (zeros, _) in lost),
            became_inf=sum(infinite for _, (_, infinite) in lost),
            compared=sum(len(_some(one.tensor)) for one, _ in lost),
            source=lost[0][0].source,
        )
        self.session.once(found, type(optimizer).__name__)


def _all_lost(held: list[_Loaded]) -> list[tuple[_Loaded, tuple[int, int]]]:
    """Pairs each mean of squares with the other tensors of its parameter: where it is 0, they have to be 0 as well."""
    of_parameter: dict[int, list[_Loaded]] = {}
    for one in held:
        if one.tensor.dtype not in HALF:
            of_parameter.setdefault(id(one.parameter), []).append(one)
    found = [(one, _lost_of_copy(one, others)) for others in of_parameter.values() for one in others]
    return [(one, lost) for one, lost in found if any(lost)]


def _loaded(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> Iterator[_Loaded]:
    """What was loaded for each parameter, in tensors of its shape; a checkpoint numbers parameters by their order."""
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    line = _own_line()
    for number, parameter in zip(numbers, parameters, strict=False):
        given, own = state_dict["state"].get(number, {}), optimizer.state.get(parameter, {})
        for key, tensor in own.items():
            stored = given.get(key)
            if _is_state_of(parameter, tensor) and _is_state_of(parameter, stored):
                rounded = _some(stored).to(tensor.device).float() != _some(tensor).float()
                yield _Loaded(parameter, str(key), tensor, stored.dtype, int(rounded.sum()), line)


def _is_state_of(parameter: Tensor, value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.shape == parameter.shape
        and value.is_floating_point()
        and measurable(value)
        and value.numel() > 0
    )


def _some(tensor: Tensor) -> Tensor:
    """Elements of a tensor, evenly spaced."""
    return tensor.detach().flatten()[:: -(-tensor.numel() // COMPARED)]


def _lost_of_copy(one: _Loaded, others: list[_Loaded]) -> tuple[int, int]:
    """How many elements of a mean of squares are 0 though another mean of the same gradients is not, and how many are inf; zeros if float16 is not why."""
    squares = _some(one.tensor)
    if bool((squares < 0).any()):
        return 0, 0
    signed = [values for other in others if bool(((values := _some(other.tensor)) < 0).any())]
    if not signed or not _went_through_float16(one, squares, signed):
        return 0, 0  # without a signed mean, nothing says that these are squares
    moved = torch.stack([values != 0 for values in signed]).any(0)
    return int(((squares == 0) & moved).sum()), int(squares.isinf().sum())


def _went_through_float16(one: _Loaded, squares: Tensor, signed: list[Tensor]) -> bool:
    """Whether float32 squares were float16 before: the checkpoint says so, or float16 holds each of them, or each of the means beside them if they are all 0."""
    if one.given is torch.float16:
        return True
    own = _different_in_float16(squares)
    return own is not None and (
        own >= DISTINCT or any((_different_in_float16(values) or 0) >= DISTINCT for values in signed)
    )


def _different_in_float16(values: Tensor) -> int | None:
    """How many different numbers there are besides 0 and inf; None if float16 does not hold one of them."""
    different = values[values.isfinite() & (values != 0)].unique()
    return len(different) if bool((different.half().to(different.dtype) == different).all()) else None
