"""Replaces the forward of single module instances, and proves it by looking the forwards up again."""

import inspect
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

from torch import nn

from dtypedoctor.corrections.contract import Installed, TargetMismatchError
from dtypedoctor.corrections.counters import Counters

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
