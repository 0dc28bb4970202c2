"""Keeps chosen modules in float32: parameters, inputs and internal arithmetic; outputs get back the dtype that they had.

A name is a module's dotted name, for the module and everything in it (an empty name is the whole model), or a dotted name
followed by ``::self``, for the module's own arithmetic and parameters alone: what its ``forward`` computes between the calls
of the modules inside it.

Nothing is rounded on the way between two kept frames: if a module's own arithmetic and one of its children are kept, what
passes between them stays in float32.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor.corrections.contract import (
    Counters,
    Installed,
    TargetMismatchError,
    require_memory,
    runs_other_forward,
)
from dtypedoctor.lab.corrections.float32_frames import (
    CallNotes,
    Float32Frame,
    Widened,
    is_narrow,
    mapped,
    narrow,
    widen,
    widen_storage,
)

OWN = "::self"

Forward = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Which modules of a model are kept.

    Attributes:
        whole: outermost modules that are kept with everything in them.
        own: modules of which only the own arithmetic is kept.
        outside: modules inside an ``own`` one that are not kept.
    """

    whole: tuple[nn.Module, ...]
    own: tuple[nn.Module, ...]
    outside: tuple[nn.Module, ...]


def select(model: nn.Module, names: Sequence[str]) -> Kept:
    """Finds the modules that ``names`` mean.

    A module that runs fused kernels on the weights of its children cannot be kept without them: its own arithmetic means
    all of it.

    Raises:
        TargetMismatchError: no name is given, or the model has no such module.
    """
    if not names:
        raise TargetMismatchError("no module is named, so there is nothing to keep in float32")
    known = dict(model.named_modules())
    named = [(_module_of(known, name.removesuffix(OWN), type(model).__name__), name.endswith(OWN)) for name in names]
    whole = {id(m): m for m, own in named if not own or runs_other_forward(m)}
    inside = {id(part) for m in whole.values() for part in m.modules() if part is not m}
    own = {id(m): m for m, is_own in named if is_own and id(m) not in whole and id(m) not in inside}
    outside = {
        id(part): part
        for m in own.values()
        for part in m.modules()
        if id(part) not in own and id(part) not in whole and id(part) not in inside
    }
    outermost = tuple(m for m in whole.values() if id(m) not in inside)
    return Kept(whole=outermost, own=tuple(own.values()), outside=tuple(outside.values()))


def _module_of(known: Mapping[str, nn.Module], name: str, model: str) -> nn.Module:
    """The module of this dotted name, or the only one whose name ends in it, as reports shorten names."""
    if name in known:
        return known[name]
    ending = [full for full in known if full.endswith(f".{name}")]
    if len(ending) == 1:
        return known[ending[0]]
    several = f"; it may be {', '.join(ending[:3])}" if ending else ""
    raise TargetMismatchError(f"{model} has {'several modules' if ending else 'no module'} {name}{several}")


@dataclass(frozen=True, slots=True)
class _Frame:
    """A kept frame that is running.

    Attributes:
        mode: widens its operands.
        autocast: the regions that the call came from, as device type and dtype; they are closed inside the frame.
    """

    mode: Float32Frame
    autocast: tuple[tuple[str, torch.dtype], ...]


class _Calls(threading.local):
    """The calls that are open in this thread, innermost last; None stands for a module that is not kept."""

    def __init__(self) -> None:
        self._open: list[_Frame | None] = []

    @property
    def frame(self) -> _Frame | None:
        """The kept frame whose code runs now, if it is one."""
        return self._open[-1] if self._open else None

    @contextmanager
    def entered(self, frame: _Frame | None) -> Iterator[None]:
        """A call begins; the frame around it does nothing until the call ends."""
        around = self.frame
        self._open.append(frame)
        if around is not None:
            around.mode.suspended += 1
        try:
            yield
        finally:
            if around is not None:
                around.mode.suspended -= 1
            self._open.pop()


def install_keep_float32(model: nn.Module, modules: Sequence[str]) -> Installed:
    """Keeps ``modules`` of ``model`` in float32.

    The counter ``hits`` counts calls of kept modules from outside, ``clamped`` the elements that the narrower dtype could not
    hold where they left for code that is not kept.

    Raises:
        TargetMismatchError: a name means no module of the model, or a forward could not be replaced.
    """
    kept = select(model, modules)
    require_memory(_stored(model, _holders(kept)))
    counters = Counters()
    forwards = _Forwards(_Calls(), counters)
    stored: Widened | None = None

    def undo() -> None:
        forwards.put_back()
        if stored is not None:
            stored.put_back()

    try:
        for module in _holders(kept):
            forwards.replace(module, forwards.kept)
        for module in kept.outside:
            forwards.replace(module, forwards.outside)
    except TargetMismatchError:
        forwards.put_back()
        raise
    stored = widen_storage(model, _holders(kept))
    return Installed(
        target=", ".join(name or "the whole model" for name in modules),
        proof=(
            f"forward of {len(_holders(kept))} modules now runs in float32; "
            f"{stored.tensors} parameters and buffers are float32, {stored.shared} that others share are cast where used"
        ),
        undo=undo,
        counters=counters,
    )


def _stored(model: nn.Module, modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The parameters and buffers of some modules, by their names in the model."""
    held = {id(one) for part in modules for one in (*part.parameters(recurse=False), *part.buffers(recurse=False))}
    named = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor for name, tensor in named if id(tensor) in held}


def _holders(kept: Kept) -> list[nn.Module]:
    return [*kept.own, *(part for module in kept.whole for part in module.modules())]


class _Forwards:
    """Replaces forwards of single instances, and puts them back."""

    def __init__(self, calls: _Calls, counters: Counters) -> None:
        self._calls = calls
        self._counters = counters
        self._originals: list[tuple[nn.Module, Forward | None]] = []

    def replace(self, module: nn.Module, wrap: Callable[[Forward], Forward]) -> None:
        """Gives ``module`` a forward around the one in force; fused kernels give way to the forward of the class.

        Raises:
            TargetMismatchError: the module does not answer with the new forward afterwards.
        """
        original: Forward = type(module).forward.__get__(module) if runs_other_forward(module) else module.forward
        replacement = torch.compiler.disable(functools.wraps(original)(wrap(original)))
        self._originals.append((module, module.__dict__.get("forward")))
        module.forward = replacement
        if module.forward is not replacement:
            raise TargetMismatchError(
                f"forward of a {type(module).__name__} was set but another function answers to it"
            )

    def put_back(self) -> None:
        """Restores every forward."""
        while self._originals:
            module, original = self._originals.pop()
            if original is None:
                module.__dict__.pop("forward", None)
            else:
                module.forward = original

    def kept(self, original: Forward) -> Forward:
        """A forward in float32; called from another kept frame it is a part of that."""
        calls, counters, notes = self._calls, self._counters, CallNotes()

        def forward(*args: Any, **kwargs: Any) -> Any:
            if calls.frame is not None:
                notes.take((args, kwargs))
                return original(*args, **kwargs)
            again = notes.restore((args, kwargs))
            counters.hit()
            frame = _Frame(
                Float32Frame(counters),
                tuple((d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)),
            )
            with calls.entered(frame), _autocast(frame.autocast, enabled=False):
                given = mapped((args, kwargs), _widened)
                with frame.mode:
                    result = original(*given[0], **given[1])
            if again:
                return result
            mapped(given, narrowed)  # tensors that were put into a dictionary of the caller's
            return mapped(result, narrowed)

        def narrowed(tensor: Tensor) -> Tensor:
            return narrow(tensor, counters)

        return forward

    def outside(self, original: Forward) -> Forward:
        """The forward of a module that is not kept: called from a kept frame it gets and gives what it always did."""
        calls, counters, notes = self._calls, self._counters, CallNotes()

        def forward(*args: Any, **kwargs: Any) -> Any:
            frame = calls.frame
            if frame is not None:
                notes.take((args, kwargs))
                notes.autocast = frame.autocast
            elif not notes.restore((args, kwargs)):
                return original(*args, **kwargs)
            with calls.entered(None), _autocast(notes.autocast, enabled=True):
                given = mapped((args, kwargs), lambda tensor: narrow(tensor, counters))
                return mapped(original(*given[0], **given[1]), _widened)

        return forward


def _widened(tensor: Tensor) -> Tensor:
    return widen(tensor) if is_narrow(tensor) else tensor


@contextmanager
def _autocast(regions: Sequence[tuple[str, torch.dtype]], *, enabled: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for device, dtype in regions:
            stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
        yield
