"""Models that stay loaded for several runs of a process: each gets them as they were built, bit for bit, or the process ends.

What a run may have changed is put back (parameters, buffers, gradients, modes of training), then everything is compared with what was
noted when the model was built. Nothing else is repaired: where a module has another class, method, hook or tensor than before, the model is
given up, and the next run is made in a new process.
"""

import gc
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import buffers_of, parameters_of
from dtypedoctor.lab.models.build import Built, build
from dtypedoctor.lab.scenarios.model import Model, Scenario
from dtypedoctor.worker.environment import available_memory, tensor_digests

_WITH_COPY, _WITHOUT_COPY = 4.0, 2.5
"""How often the weights have to fit into what is free beside them, for a copy of them to be kept there, and for the model to stay at all: a
float32 reference takes twice as much as weights in half precision."""


class NotRestoredError(Exception):
    """A model is not what it was when it was built; the message says in what."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter or buffer as it was built.

    Attributes:
        name: dotted name.
        tensor: the object.
        digest: of its bits.
        copy: the bits themselves; None where there was no room for them.
        trained: whether it required gradients.
    """

    name: str
    tensor: Tensor
    digest: int
    copy: Tensor | None
    trained: bool


class Pristine:
    """A model as it was built.

    Args:
        model: just built.

    Attributes:
        may_stay: whether there is room for a float32 reference beside it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        keeps_copy = _fits(model, _WITH_COPY)
        self.may_stay = _fits(model, _WITHOUT_COPY)
        named = list(_tensors(model))
        digests = tensor_digests([tensor for _, tensor in named])
        self._places = [
            _Place(
                name=name,
                tensor=tensor,
                digest=digest,
                copy=tensor.detach().clone() if keeps_copy else None,
                trained=tensor.requires_grad,
            )
            for (name, tensor), digest in zip(named, digests, strict=True)
        ]
        self._training = {module: module.training for module in model.modules()}
        self._shape = _shape(model)

    def put_back(self) -> None:
        """Makes the model what it was.

        Raises:
            NotRestoredError: it cannot be made so.
        """
        for module, training in self._training.items():
            module.training = training
        if (difference := _difference(self._shape, _shape(self._model))) is not None:
            raise NotRestoredError(difference)
        for place in self._places:
            place.tensor.grad = None
            place.tensor.requires_grad_(place.trained)
        changed = _with_other_values(self._places)
        with torch.no_grad():
            for place in changed:
                if place.copy is not None:
                    place.tensor.copy_(place.copy)
        for place in _with_other_values(changed):
            raise NotRestoredError(f"{place.name} has other values")


class Stock:
    """The models of a process: those that were built in advance stay for all of its runs, others go after theirs."""

    def __init__(self) -> None:
        self._built: dict[str, tuple[Built, Pristine]] = {}
        self.taken_bytes = 0
        """Memory of the models that a run took out of the stock: a run that builds them itself measures it as its own."""

    def fill(self, scenario: Scenario, device: torch.device) -> None:
        """Builds the scenario's models, which stay where a device has room for those of other runs beside them.

        Raises:
            UsageError: a model cannot be built.
        """
        for spec in (step.model for step in scenario.steps if step.model is not None):
            built = build(spec, device, scenario.seed)
            pristine = Pristine(built.model)
            if pristine.may_stay:
                self._built[_key(spec, device, scenario.seed)] = built, pristine
            else:
                print("the model is loaded for each run: it takes too much memory to stay", file=sys.stderr, flush=True)
        gc.collect()
        gc.freeze()  # what stays need not be searched for garbage before each run

    def take(self, spec: Model, device: torch.device, seed: int, *, on_host: bool = False) -> Built:
        """The model that ``spec`` asks for, out of the stock or built now; ``on_host`` as in :func:`dtypedoctor.lab.models.build.build`.

        Raises:
            UsageError: it cannot be built.
        """
        key = _key(spec, device, seed)
        if key not in self._built:
            return build(spec, device, seed, on_host=on_host)
        built, _ = self._built[key]
        self.taken_bytes += sum(t.numel() * t.element_size() for t in built.model.state_dict().values())
        return built

    def put_back(self) -> None:
        """Makes all models that stay what they were.

        Raises:
            NotRestoredError: one cannot be made so.
        """
        self.taken_bytes = 0
        gc.collect()
        for _, pristine in self._built.values():
            pristine.put_back()
        if torch.cuda.is_initialized() and _kept_by_allocator() > _WORTH_FREEING:
            torch.cuda.empty_cache()  # whose models and gradients the last run has left; where the next model's parts go depends on what is free


def _key(spec: Model, device: torch.device, seed: int) -> str:
    """Says of a model all that its building depends on."""
    return f"{device} {seed} {spec.model_dump_json()}"


def _with_other_values(places: Sequence[_Place]) -> list[_Place]:
    """Those whose tensor does not hold the bits that it was built with."""
    digests = tensor_digests([place.tensor for place in places])
    return [place for place, digest in zip(places, digests, strict=True) if digest != place.digest]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and buffer once, however many names it has."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _fits(model: nn.Module, times: float) -> bool:
    """Whether each device that holds weights has room for them so often again."""
    taken: Counter[torch.device] = Counter()
    for _, tensor in _tensors(model):
        taken[tensor.device] += tensor.numel() * tensor.element_size()
    return all(held * times <= _free(device) for device, held in taken.items())


_WORTH_FREEING = 1 << 30


def _kept_by_allocator() -> int:
    """Bytes of all GPUs that no tensor has and that nobody else can have."""
    return sum(
        torch.cuda.memory_reserved(one) - torch.cuda.memory_allocated(one) for one in range(torch.cuda.device_count())
    )


def _free(device: torch.device) -> int:
    """Bytes that are free there."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()


_Shape = dict[str, tuple[Any, ...]]


def _shape(model: nn.Module) -> _Shape:
    """By dotted name what each module is: its class, its attributes, hooks and tensors by identity, dtype, shape and place in memory."""
    found: _Shape = {}
    for name, module in model.named_modules():
        tensors = {**parameters_of(module), **buffers_of(module)}
        own = {key: _identity(value) for key, value in vars(module).items() if key != "training"}
        hooks = [list(table) for key, table in vars(module).items() if key.endswith("_hooks") and table]
        facts = {key: _facts(tensor) for key, tensor in tensors.items() if tensor is not None}
        found[name] = (type(module), own, hooks, facts)
    return found


def _identity(value: Any) -> Any:
    """What an attribute is told by: plain values by themselves, everything else as the object that it is."""
    return value if isinstance(value, (str, int, float, bool, type(None))) else id(value)


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return id(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), str(tensor.device)


def _difference(before: _Shape, after: _Shape) -> str | None:
    """The first module that is not what it was; None where all are."""
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            return f"{name or 'the model'} is not what was built"
    return None
