"""What a correction is: it replaces code, proves by looking it up again that it is in place, counts what it does, and is undone."""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MethodType, TracebackType
from typing import Any, Self

import torch
from torch import nn

from dtypedoctor.errors import UsageError
from dtypedoctor.plugins import KEEP_FLOAT32, Correction, correction_named, known, registered, resolve
from dtypedoctor.source_edits import TargetMismatchError, install
from dtypedoctor.text import did_you_mean
from dtypedoctor.trace.events import OFFLOADED

__all__ = ["Counters", "Forward", "Installed", "TargetMismatchError", "install_edits", "named_modules_of", "put_in",
           "replace_attribute", "require_memory", "require_signature", "runs_other_forward", "wrap_forwards"]  # fmt: skip


@dataclass(slots=True)
class Counters:
    """What a correction did. Element counts stay on the device until they are read, so counting never synchronizes."""

    hits: int = 0
    paused: bool = False
    """While True nothing is counted (the probe batch is not part of the run)."""
    _elements: dict[str, torch.Tensor] = field(default_factory=dict)

    def hit(self) -> None:
        """Counts one use of the corrective path."""
        if not self.paused:
            self.hits += 1

    def add(self, name: str, mask: torch.Tensor) -> None:
        """Adds the number of True elements of ``mask`` (bool, any shape) to the counter ``name``."""
        if self.paused:
            return
        count = mask.sum(dtype=torch.int64)
        held = self._elements.get(name)
        self._elements[name] = count if held is None else held + count.to(held.device)

    def elements(self, name: str) -> int:
        """The value of the counter ``name``; waits for the device."""
        held = self._elements.get(name)
        return 0 if held is None else int(held.item())


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A correction that is in place.

    Attributes:
        target: dotted name of what was replaced.
        proof: how it is known to be in place, in words (e.g. which code object runs now).
        undo: puts the original back; calling it twice does no harm.
        counters: ``hits``, and the element counters ``rescued`` (non-finite results replaced) and ``clamped``.
    """

    target: str
    proof: str
    undo: Callable[[], None]
    counters: Counters = field(default_factory=Counters)


def put_in(name: str, model: nn.Module, modules: Sequence[str]) -> Installed:
    """Installs the registered correction of this id in ``model``.

    Raises:
        UsageError: no correction has this id, or its code cannot be imported.
        TargetMismatchError: the code is not what the correction was written for; the model is as it was.
        TypeError: the correction's ``install`` returned something else than :class:`Installed`.
    """
    correction = registered(Correction).get(name)
    if correction is None:
        meant = did_you_mean(name, registered(Correction))
        raise UsageError(f"there is no correction {name!r}{meant}", known(Correction))
    if correction.edits:
        return install_edits(correction)
    try:
        put = resolve(correction.install)
    except ImportError as error:
        raise UsageError(f"correction {name}: cannot import {correction.install}: {error}") from error
    installed = put(model, modules)
    if not isinstance(installed, Installed):
        raise TypeError(f"install of {name} ({correction.install}) returned {type(installed).__name__}, not Installed")
    return installed


def require_memory(named: Mapping[str, torch.Tensor]) -> None:
    """Raises :class:`TargetMismatchError` where a parameter or buffer is loaded for each call by somebody else, in the dtype that it has there."""
    elsewhere = next((name for name, tensor in named.items() if tensor.is_meta), None)
    if elsewhere is not None:
        raise TargetMismatchError(f"{OFFLOADED.format(name=elsewhere)}; run the script without the offload to try it")


def install_edits(correction: Correction) -> Installed:
    """Puts the edits of a correction into those modules of its library that have been imported.

    Raises:
        TargetMismatchError: no module has been imported, or the code of one is not what an edit was written for.
    """
    imported = [edit for edit in correction.edits if edit.module in sys.modules]
    if not imported:
        raise TargetMismatchError(f"{correction.edits[0].module} has not been imported")
    counters = Counters()
    places: list[str] = []
    undoing: list[Callable[[], None]] = []

    def undo() -> None:
        for one in undoing:
            one()

    for edit in imported:
        try:
            place, one = install(edit, sys.modules[edit.module], lambda _: counters.hit())
        except TargetMismatchError:
            undo()
            raise
        places.append(place)
        undoing.append(one)
    target = ", ".join(f"{edit.module}.{edit.function}" for edit in imported)
    return Installed(target=target, proof=f"corrected lines at {', '.join(places)}", undo=undo, counters=counters)


def require_signature(function: Callable[..., Any], expected: Sequence[str], target: str) -> None:
    """Checks the parameter names of ``function``.

    Raises:
        TargetMismatchError: they differ from ``expected``; annotations and defaults are ignored.
    """
    found = list(inspect.signature(function).parameters)
    if found != list(expected):
        raise TargetMismatchError(
            f"{target} takes ({', '.join(found)}), this correction was written for ({', '.join(expected)})"
        )


def replace_attribute(owner: Any, name: str, replacement: Callable[..., Any], counters: Counters) -> Installed:
    """Replaces ``owner.name`` (a class's method or a module's function) and proves it by looking it up again.

    Raises:
        TargetMismatchError: the lookup afterwards does not find ``replacement``'s code.
    """
    original = owner.__dict__[name]
    setattr(owner, name, replacement)
    found = inspect.unwrap(getattr(owner, name))
    code = getattr(found, "__code__", None)
    label = f"{getattr(owner, '__module__', '')}.{getattr(owner, '__qualname__', owner.__name__)}.{name}".lstrip(".")
    if code is not inspect.unwrap(replacement).__code__:
        setattr(owner, name, original)
        raise TargetMismatchError(f"{label} was set but another function answers to it")

    def undo() -> None:
        setattr(owner, name, original)

    place = f"{'/'.join(code.co_filename.rsplit('/', 2)[-2:])}:{code.co_firstlineno}"
    return Installed(target=label, proof=f"{label} now runs {place}", undo=undo, counters=counters)


Forward = Callable[..., Any]


def wrap_forwards(
    modules: Mapping[str, nn.Module], wrap: Callable[[nn.Module, Forward], Forward], counters: Counters
) -> Installed:
    """Gives each module ``wrap(module, its forward)`` as its forward; hooks on the module see the corrected result.

    Args:
        modules: dotted name to module; not empty.
        wrap: makes the new forward from the one that is in force, which may already be an instance's own.
        counters: counters of the correction.

    Raises:
        TargetMismatchError: a module does not answer with the new forward afterwards; everything is put back.
    """
    originals = {name: module.__dict__.get("forward") for name, module in modules.items()}

    def undo() -> None:
        for name, module in modules.items():
            original = originals[name]
            if original is not None:
                module.forward = original
            else:
                module.__dict__.pop("forward", None)

    place = ""
    for name, module in modules.items():
        replacement = wrap(module, module.forward)
        module.forward = replacement
        if inspect.unwrap(module.forward).__code__ is not replacement.__code__:
            undo()
            raise TargetMismatchError(f"{name}.forward was set but another function answers to it")
        code = replacement.__code__
        place = f"{'/'.join(code.co_filename.rsplit('/', 2)[-2:])}:{code.co_firstlineno}"
    names = ", ".join(modules)
    return Installed(
        target=names, proof=f"forward of {len(modules)} modules now runs {place}", undo=undo, counters=counters
    )


def runs_other_forward(module: nn.Module) -> bool:
    """Whether ``module`` runs a method that is bound to it in the place of its class's forward, as fused training libraries do.

    A wrapper around the forward of the class is not meant; it says with ``__wrapped__`` what it wraps, or is no method.
    """
    method = module.__dict__.get("forward")
    return isinstance(method, MethodType) and method.__self__ is module and not hasattr(method, "__wrapped__")


def named_modules_of(model: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    """The modules of ``model`` with these dotted names.

    Raises:
        TargetMismatchError: the model has no module of one of these names.
    """
    known = dict(model.named_modules())
    missing = [name for name in names if name not in known]
    if missing:
        raise TargetMismatchError(f"{type(model).__name__} has no module {', '.join(missing)}")
    return {name: known[name] for name in names}


class Applied:
    """A fix that is in place in a model, from :func:`apply` to :meth:`undo` or to the end of a ``with`` block.

    Attributes:
        fix: as it was named.
        target: dotted names of what was replaced.
        proof: how it is known to be in place, in words.
    """

    def __init__(self, fix: str, installed: Installed) -> None:
        self.fix = fix
        self.target = installed.target
        self.proof = installed.proof
        self._installed = installed

    @property
    def hits(self) -> int:
        """How often the corrective code has run; of ``bfloat16`` how many tensors were cast. Does not wait for the device."""
        return self._installed.counters.hits

    @property
    def clamped(self) -> int:
        """Elements that were clamped to the narrower dtype's max. Waits for the device."""
        return self._installed.counters.elements("clamped")

    @property
    def replaced(self) -> int:
        """Elements that were inf or NaN and were replaced by finite values. Waits for the device."""
        return self._installed.counters.elements("rescued")

    def undo(self) -> None:
        """Puts back what was replaced; a second time it does nothing."""
        self._installed.undo()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<{self.fix}: {self.hits} hits, {self.clamped} elements clamped, {self.replaced} replaced>"


def apply(model: nn.Module, fix: str, *, modules: Sequence[str] = ()) -> Applied:
    """Puts a fix into a live model, e.g. what ``dtypedoctor bisect`` has found.

    Call it when the model is loaded and on its device, before the optimizer is made: some fixes change the dtype of parameters.

    Args:
        model: the model that the program calls.
        fix: ``keep-float32:layers.3.mlp`` (more modules behind commas; ``::self`` behind a name for its own operators alone),
            ``bfloat16`` (float16 weights and inputs become bfloat16), or the id of a correction.
        modules: dotted names of more modules that it is for, as ``apply(model, "keep-float32", modules=["layers.3.mlp"])``.

    Raises:
        UsageError: there is no such fix, no module is named for ``keep-float32``, or ``model`` is no module.
        TargetMismatchError: the model is not what the fix was written for, or has no such module; it is as it was.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"dtypedoctor.apply: {type(model).__name__} is not a torch.nn.Module", "Pass the model first.")
    name, of_text = correction_named(fix)
    named = [*of_text, *correction_named(f"{name}:{','.join(modules)}")[1]]
    if name == KEEP_FLOAT32 and not named:
        raise UsageError("keep-float32: which modules?", 'Name them: apply(model, "keep-float32:layers.3.mlp").')
    return Applied(fix, put_in(name, model, named))
