"""A module call whose objects are still alive: what it was called with and under which modes, and how to make it again.

A :class:`LiveCall` holds references and costs nothing but the state of a random generator, so one can be kept for each open call. Making the
call again runs the program's code: it draws from the program's generators (which are put back), and it may write to buffers, caches and
arguments. In a process that goes on, pass copies (:func:`copied`) and put the module's buffers back.

What a call depends on beside its module and its arguments are :class:`Settings` of torch and random generators (:class:`RandomState`).
"""

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from traceback import clear_frames
from types import SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from dtypedoctor._torch_private import as_the_program, buffers_of, default_device, hook_gradient, parameters_of
from dtypedoctor.instrument.module_tree import DEEPEST, held_in, mapped, modules_in, named_modules
from dtypedoctor.interruptions import contained

__all__ = [
    "AutocastState",
    "GradientHook",
    "LiveCall",
    "RandomState",
    "Repeat",
    "Settings",
    "as_leaf",
    "copied",
    "from_outside",
    "inputs_in",
    "tensors_of",
]

_FLAGS = (
    "cuda.matmul.fp32_precision",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "cudnn.conv.fp32_precision",
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
)
"""Of ``torch.backends``."""


def _flag(name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    owner, _, last = name.rpartition(".")
    read, owner_of = attrgetter(name), attrgetter(owner)
    return partial(read, torch.backends), lambda value: setattr(owner_of(torch.backends), last, value)


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (_deterministic, lambda value: torch.use_deterministic_algorithms(value[0], warn_only=value[1])),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    *map(_flag, _FLAGS),
)
"""How each setting is read and written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of the process at one moment.

    Attributes:
        values: of :data:`_SETTINGS`; None for one that could not be read.
        device: where new tensors go, as the program has named it.
    """

    values: tuple[Any, ...]
    device: torch.device

    @staticmethod
    def now() -> "Settings":
        """What is set now."""
        return Settings(values=tuple(_read(read) for read, _ in _SETTINGS), device=default_device())

    @property
    def default_dtype(self) -> torch.dtype:
        """That of new floating-point tensors."""
        dtype: torch.dtype = self.values[0]
        return dtype

    def with_default_dtype(self, name: str) -> "Settings":
        """These settings, but for the default dtype."""
        return replace(self, values=(getattr(torch, name), *self.values[1:]))

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Inside, all is set as it was then; afterwards as it is now. What is equal is not touched: other threads may compute."""
        with ExitStack() as stack:
            for (read, write), value in zip(_SETTINGS, self.values, strict=True):
                present = _read(read)
                if value is not None and value != present:
                    stack.callback(write, present)
                    write(value)
            if self.device != default_device():
                stack.enter_context(self.device)
            yield


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except (
        AttributeError,
        RuntimeError,
    ):  # this build has no such setting, or the program has set it by its old and its new name
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """State of torch's default generators, Python's and NumPy's.

    Attributes:
        cpu: of torch on the CPU, uint8.
        cuda: of each CUDA device, uint8; empty where CUDA is not in use.
        python, numpy: of theirs; None where they are left alone.
    """

    cpu: Tensor
    cuda: tuple[Tensor, ...] = ()
    python: Any = None
    numpy: Any = None

    @staticmethod
    def now(*, host: bool = True) -> "RandomState":
        """The present state; does not initialise CUDA and does not wait for it.

        Args:
            host: also that of Python's generator and NumPy's, whose form takes longer to make than all the rest.
        """
        devices = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
        generator = sys.modules.get("numpy.random") if host else None  # an attribute of numpy would import it
        return RandomState(
            cpu=torch.default_generator.get_state(),
            cuda=tuple(map(torch.Generator.get_state, devices)),
            python=random.getstate() if host else None,
            numpy=generator.get_state() if generator is not None else None,
        )

    def host_has_moved(self) -> bool:
        """Whether Python's generator or NumPy's has been drawn from since."""
        generator = sys.modules.get("numpy.random")
        if self.numpy is not None and generator is not None:
            now = generator.get_state()
            is_usual = isinstance(now, tuple) and isinstance(self.numpy, tuple)  # another generator has a dictionary
            if not is_usual or now[2:] != self.numpy[2:] or (now[1] != self.numpy[1]).any():
                return True
        return self.python is not None and random.getstate() != self.python

    def restore(self) -> None:
        """Puts the generators into this state."""
        torch.set_rng_state(self.cpu)
        for generator, state in zip(torch.cuda.default_generators, self.cuda, strict=False):
            generator.set_state(state)
        if self.python is not None:
            random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)


_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class AutocastState:
    """Autocast of one device type, where it is on.

    Attributes:
        device: ``cpu`` or ``cuda``.
        dtype: to which it casts.
    """

    device: str
    dtype: torch.dtype

    @staticmethod
    def now() -> "tuple[AutocastState, ...]":
        """What is on; below a dispatch mode autocast always reads as off."""
        on: tuple[AutocastState, ...] = ()
        for device in _DEVICES:
            if torch.is_autocast_enabled(device):
                on += (AutocastState(device=device, dtype=torch.get_autocast_dtype(device)),)
        return on


@dataclass(slots=True, kw_only=True)
class Repeat:
    """What a call did when it was made again.

    Attributes:
        output: what it returned; None where the forward raised.
        error: what it raised, forward or backward; None where it raised nothing.
        upstream: the gradients that went back through it, by index of the output: :func:`from_outside`.
        gradients: by name (``input.0``, ``input.mask.1``, ``weight.proj.weight``) the gradients that these make; empty where there are
            none, or where it raised.
        drew: it drew random numbers.
    """

    output: Any = None
    error: BaseException | None = None
    upstream: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    drew: bool = False


@dataclass(slots=True, kw_only=True)
class LiveCall:
    """One call of a module, recorded when it was entered.

    Attributes:
        called: what was called, or a weak reference to it.
        fqn: its dotted name in the program's model.
        args, kwargs: the arguments themselves.
        grad: whether gradients were enabled.
        inference: whether inference mode was on.
        autocast: what was on.
        known_settings: what torch was set to; None for what it is set to when the call is made again.
        training: whether the module was in training mode.
        random: the generators at entry; None where they were not asked for.
        gradients: by index among :func:`tensors_of` the output, the gradient that came back for that tensor, also by way of other
            outputs (:func:`from_outside` leaves these out). Filled by :meth:`keep_gradients`.
    """

    called: nn.Module | ref[nn.Module]
    fqn: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    inference: bool
    autocast: tuple[AutocastState, ...]
    known_settings: Settings | None
    training: bool
    random: RandomState | None
    gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def module(self) -> nn.Module:
        """What was called.

        Raises:
            ReferenceError: the program has let go of it.
        """
        if not isinstance(self.called, ref):
            return self.called
        module = self.called()
        if module is None:
            raise ReferenceError("the module that was called is gone")
        return module

    def let_go(self, gone: Callable[[ref[nn.Module]], None]) -> None:
        """Holds the module no longer; ``gone`` is called when the program does not either."""
        self.called = ref(self.module, gone)

    @property
    def is_there(self) -> bool:
        """Whether the program still has what was called."""
        return not isinstance(self.called, ref) or self.called() is not None

    @property
    def settings(self) -> Settings:
        """What torch was set to."""
        return self.known_settings or Settings.now()

    @staticmethod
    def entered(
        module: nn.Module, fqn: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, random: bool = True,
        settings: bool = True, host: bool = True,
    ) -> "LiveCall":  # fmt: skip
        """The record of a call that is being entered.

        Args:
            module: what is called.
            fqn: its dotted name.
            args: its positional arguments (:func:`dtypedoctor.instrument.whereabouts.call_arguments` reads them in a hook).
            kwargs: its keyword arguments.
            random: also keep the state of the generators (8 kB, 30 kB in Python's form).
            settings: also read what torch is set to, which takes as long as all the rest.
            host: of these generators also Python's and NumPy's.
        """
        return LiveCall(
            called=module,
            fqn=fqn,
            args=tuple(args),
            kwargs=dict(kwargs),
            grad=torch.is_grad_enabled(),
            inference=torch.is_inference_mode_enabled(),
            autocast=AutocastState.now(),
            known_settings=Settings.now() if settings else None,
            training=module.training,
            random=RandomState.now(host=host) if random else None,
        )

    def inputs(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors among the arguments, with names such as ``input.0`` and ``input.mask``; later in the same order."""
        return inputs_in(self.args, self.kwargs)

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """The module's parameters, with names such as ``weight.proj.weight``."""
        for prefix, part in named_modules(self.module):
            for name, parameter in parameters_of(part).items():
                if parameter is not None:
                    yield f"weight.{prefix}.{name}" if prefix else f"weight.{name}", parameter

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        """The module's buffers, with names such as ``weight.rotary.inv_freq``."""
        for prefix, part in named_modules(self.module):
            for name, buffer in buffers_of(part).items():
                if buffer is not None:
                    yield f"weight.{prefix}.{name}" if prefix else f"weight.{name}", buffer

    def keep_gradients(self, outputs: Iterable[Tensor]) -> None:
        """Keeps the first gradient that comes back for each of ``outputs``, which the call has just returned, by reference."""
        for index, output in enumerate(outputs):
            if output.requires_grad:
                hook_gradient(output, GradientHook(partial(self.gradients.setdefault, index)))

    @contextmanager
    def modes(self) -> Iterator[None]:
        """Inside, gradients, autocast, settings and the generators are as they were at entry; afterwards as they are now.

        Autocast keeps no copies of weights inside: one made here would be found by the program's own calls.
        """
        present = RandomState.now()
        with ExitStack() as stack:
            stack.callback(present.restore)
            if self.random is not None:
                self.random.restore()
            stack.enter_context(self.settings.in_force())
            stack.enter_context(self._in_its_mode())
            stack.enter_context(as_the_program())
            stack.enter_context(torch.inference_mode(self.inference))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            on = {state.device: state.dtype for state in self.autocast}
            for device in _DEVICES:
                if device in on or torch.is_autocast_enabled(device):
                    dtype = on.get(device, torch.get_autocast_dtype(device))
                    stack.enter_context(torch.autocast(device, dtype=dtype, enabled=device in on, cache_enabled=False))
            yield

    @contextmanager
    def _in_its_mode(self) -> Iterator[None]:
        """Inside, the module trains or evaluates as it did; parts that are kept in another mode than the module stay in it."""
        now = self.module.training
        parts = [part for part in modules_in(self.module) if part.training == now] if now != self.training else []
        for part in parts:
            part.training = self.training
        try:
            yield
        finally:
            for part in parts:
                part.training = now

    def again(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        forward: "Forward | None" = None,
        pull: "Pull | None" = None,
    ) -> Repeat:
        """Makes the call again, and the backward pass through it where an upstream gradient is known.

        Inputs are detached, so the backward pass ends at them; no ``grad`` of a parameter changes. The caller mutes the instruments, or watches.

        Args:
            args, kwargs: passed instead, e.g. copies; default the arguments themselves.
            forward: entered around the forward pass, within its modes, with the call as it is made; gives what is really passed.
            pull: computes the gradients in the place of :meth:`pulled`.
        """
        memo: dict[int, Any] = {}
        made = replace(
            self,
            args=mapped(tuple(self.args if args is None else args), as_leaf, memo),
            kwargs=mapped(dict(self.kwargs if kwargs is None else kwargs), as_leaf, memo),
        )
        repeat = Repeat()
        with self.modes():
            before = torch.get_rng_state()
            with contained() as attempt, (forward or _as_it_was)(made) as (passed, named):
                repeat.output = self.module(*passed, **named)
            repeat.drew = not torch.equal(before, torch.get_rng_state())
        repeat.error = attempt.error
        if self.gradients and repeat.error is None:
            repeat.upstream = from_outside(self.gradients, list(tensors_of(repeat.output)))
            with contained() as attempt:
                repeat.gradients = (pull or LiveCall.pulled)(made, repeat.output, repeat.upstream)
            repeat.error = attempt.error
        if repeat.error is not None:
            clear_frames(
                repeat.error.__traceback__
            )  # their variables hold the graph, and this frame the exception: a circle
        return repeat

    def pulled(self, output: Any, upstream: Mapping[int, Tensor]) -> dict[str, Tensor]:
        """The gradients of inputs and parameters that ``upstream``, by index among the tensors of ``output``, makes through it."""
        wanted = {name: tensor for name, tensor in (*self.inputs(), *self.parameters()) if tensor.requires_grad}
        ends, gradients = [], []
        for index, tensor in enumerate(tensors_of(output)):
            if index in upstream and tensor.requires_grad:
                ends.append(tensor)
                gradients.append(upstream[index].to(tensor.dtype))
        if not ends or not wanted:
            return {}
        results = torch.autograd.grad(ends, list(wanted.values()), gradients, allow_unused=True)
        return {name: result for name, result in zip(wanted, results, strict=True) if result is not None}


class GradientHook:
    """Tells of the gradient of a tensor; nothing where only its siblings were used."""

    __slots__ = ("__weakref__", "_told")
    __torch_unserializable__ = True
    """torch warns of other hooks when it pickles a tensor."""

    def __init__(self, told: Callable[[Tensor], object]) -> None:
        self._told = told

    def __call__(self, gradient: Tensor | None) -> None:
        """It has come back."""
        if gradient is not None:
            self._told(gradient)


Forward = Callable[[LiveCall], AbstractContextManager[tuple[Sequence[Any], Mapping[str, Any]]]]
Pull = Callable[[LiveCall, Any, Mapping[int, Tensor]], dict[str, Tensor]]


@contextmanager
def _as_it_was(made: LiveCall) -> Iterator[tuple[Sequence[Any], Mapping[str, Any]]]:
    yield made.args, made.kwargs


def from_outside(gradients: Mapping[int, Tensor], outputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """Of the gradients that came back for the outputs of a call, those that did not come by way of another output.

    What comes back for the logits of a model that also returns its loss has come from the loss, and would count twice. Where a program
    uses both, what it makes of the logits itself is left out.

    Args:
        gradients: by index of the output.
        outputs: of the call, or of one that was made again; the autograd graph behind them is read and nothing runs.
    """
    ends = {
        index: get_gradient_edge(tensor)
        for index, tensor in enumerate(outputs)
        if index in gradients and tensor.requires_grad
    }
    first = {(edge.node, edge.output_nr): index for index, edge in reversed(ends.items())}
    found = {index: gradients[index] for index in sorted(first.values())}  # a tensor that is returned twice counts once
    for edge in ends.values() if len(found) > 1 else ():
        for behind in _edges_behind(edge.node):
            if behind in first:
                found.pop(first[behind], None)
    return found


def _edges_behind(node: Node) -> Iterator[tuple[Node, int]]:
    """The edges of the autograd graph that a backward pass from ``node`` goes along."""
    waiting, seen = [node], {node}
    while waiting:
        for following, number in waiting.pop().next_functions:
            if following is None:
                continue
            yield following, number
            if following not in seen:
                seen.add(following)
                waiting.append(following)


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors of nested tuples, lists, dictionaries and simple namespaces, in an order that a repeated call keeps."""
    if isinstance(value, Tensor):
        return [value]
    found: list[Tensor] = []
    if isinstance(value, (tuple, list, dict, SimpleNamespace)):
        for _, item in held_in(value):
            found += [item] if isinstance(item, Tensor) else tensors_of(item)
    return found


def copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """``value`` with every tensor in it replaced by a detached copy; what was one tensor stays one.

    Args:
        value: arguments of a call.
        memo: copies made so far by the identity of what they are copies of; pass the same one for all arguments of a call.
    """
    return mapped(value, _copy, {} if memo is None else memo)


def inputs_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The tensors among the arguments of a call, with names such as ``input.0`` and ``input.mask``."""
    for name, value in (*enumerate(args), *kwargs.items()):
        yield from _paths(value, f"input.{name}", DEEPEST)


def _paths(value: Any, path: str, deepest: int) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield path, value
    elif deepest:
        for name, item in held_in(value):
            yield from _paths(item, f"{path}.{name}", deepest - 1)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def as_leaf(tensor: Tensor) -> Tensor:
    """The same values as the beginning of an autograd graph."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
