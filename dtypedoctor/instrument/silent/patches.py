"""Patches of methods that were prepared, or asked for, and are not in place."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from torch import nn

from dtypedoctor.instrument.frames import Line
from dtypedoctor.instrument.module_tree import ByModule, modules_in
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.trace.records.silent import Unpatched
from dtypedoctor.unpatched import unwrap

if TYPE_CHECKING:
    from dtypedoctor.instrument.silent.checks import Checks

__all__ = ["PatchCheck"]

BACKUP = "orig"
"""Part of the names under which originals are kept."""


PATCHERS = {"unsloth_zoo.temporary_patches.utils": ("patch_function", "patch_function_past_key_values")}
"""By module, functions that are given a class, the name of a method and its replacement (or several, of which one has to fit), and return whether they have
replaced the method. unsloth_zoo has all of its patches of classes made by these, and looks at no answer."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A function that was to replace a method: its code, and the name and module of the function that prepared it."""

    code: CodeType
    patcher: str
    module: str


@dataclass(frozen=True, slots=True)
class _LeftOut:
    """A patch that was asked for and not made. ``by``: the function that said so."""

    by: str
    candidates: list[_Candidate]


class PatchCheck(Observer):
    """Writes an :class:`Unpatched` for each class with a method that a patch was to replace and did not.

    A patcher keeps the original under another name and then replaces the method. Where it stops after the first half, the kept
    original and the method that runs are the same function: the code object tells, the presence of the backup does not. Where it stops
    before that, only its answer tells, if it is one that is known to give one.
    """

    waits_for = tuple(PATCHERS)

    def __init__(self, checks: "Checks") -> None:
        super().__init__(checks)
        self._roots: ByModule[None] = ByModule()
        self._classes: set[type] = set()
        self._made: set[tuple[type, str]] = set()
        self._left_out: dict[tuple[type, str], _LeftOut] = {}

    def imported(self, module: str) -> None:
        """A library's patchers are there: notes what they answer."""
        note = self.session.guard.shield(self._note, "which patches were left out")
        patchers = sys.modules[module]
        for name in PATCHERS[module]:
            original = getattr(patchers, name, None)
            if isinstance(original, FunctionType):
                self.replace(patchers, name, _followed(original, note))

    def _note(self, original: FunctionType, patcher: str, arguments: Any, answer: Any) -> None:
        target, method, functions, *_ = inspect.signature(original).bind(*arguments[0], **arguments[1]).args
        if not isinstance(target, type):
            return
        if answer:
            self._made.add((target, method))
            return
        found = [unwrap(function) for function in (functions if isinstance(functions, (list, tuple)) else [functions])]
        candidates = [_Candidate(f.__code__, patcher, f.__module__) for f in found if isinstance(f, FunctionType)]
        self._left_out[target, method] = _LeftOut(f"{original.__module__}.{original.__name__}", candidates)

    def before_call(self, module: nn.Module) -> None:
        """An outermost call begins; at the first one of a module the classes in it are looked at."""
        if module in self._roots:
            return
        self._roots[module] = None
        for child in modules_in(module):
            cls = type(child)
            if cls in self._classes:
                continue
            self._classes.add(cls)
            place = self.session.names.find(child)
            found = list(_unpatched(cls))
            found += self._refused(cls, {each.method for each in found})
            for each in found:
                self.session.once(each, (cls, each.method, each.attribute), place[1] if place is not None else None)

    def _refused(self, cls: type, known: set[str]) -> Iterator[Unpatched]:
        """Methods of a class that a patch was to replace, and that run as they were."""
        for (target, method), left_out in self._left_out.items():
            runs = _function(cls, method)
            if target not in cls.__mro__ or (target, method) in self._made or method in known or runs is None:
                continue
            if runs.__code__ not in [candidate.code for candidate in left_out.candidates]:
                yield _not_patched(cls, method, runs, left_out.candidates, refused_by=left_out.by)


def _followed(original: FunctionType, note: Callable[..., None]) -> Callable[..., Any]:
    """``original``, of whose answer ``note`` is told where another module has asked."""

    @functools.wraps(original)
    def followed(*args: Any, **kwargs: Any) -> Any:
        answer = original(*args, **kwargs)
        caller = sys._getframe(1)
        if caller.f_globals is not original.__globals__:
            note(original, caller.f_code.co_name, (args, kwargs), answer)
        return answer

    return followed


def _unpatched(cls: type) -> Iterator[Unpatched]:
    """Attributes that keep what a method was before a patch, though the method still is that."""
    methods = {name: _function(cls, name) for name in dir(cls) if BACKUP not in name.lower()}
    for attribute in _backups(cls):
        kept = _function(cls, attribute)
        if kept is None:
            continue
        for method, function in methods.items():
            if function is not None and function.__code__ is kept.__code__:
                yield _not_patched(cls, method, kept, _prepared(cls, method), attribute=attribute)


def _not_patched(
    cls: type,
    method: str,
    runs: FunctionType,
    candidates: list[_Candidate],
    *,
    attribute: str = "",
    refused_by: str = "",
) -> Unpatched:
    """Of several replacements the one is named that has most parameters in common with the method; of equal ones the last."""
    has = _parameters(runs.__code__)
    replacement = {}
    if candidates:
        nearest = max(reversed(candidates), key=lambda candidate: len(set(_parameters(candidate.code)) & set(has)))
        takes = _parameters(nearest.code)
        replacement = {
            "patcher": nearest.patcher,
            "replacement": Line(nearest.code, nearest.module, nearest.code.co_firstlineno).source,
            "surplus": ", ".join(name for name in takes if name not in has),
            "missing": ", ".join(name for name in has if name not in takes),
        }
    source = Line(runs.__code__, runs.__module__, runs.__code__.co_firstlineno).source
    return Unpatched(
        class_=cls.__name__, method=method, attribute=attribute, source=source, refused_by=refused_by, **replacement
    )


def _prepared(cls: type, method: str) -> list[_Candidate]:
    """What was to replace a method: a patcher names the class, and defines a function with the method's name inside of its own."""
    return [
        _Candidate(code, patcher.__name__, patcher.__module__)
        for patcher in _functions_naming(cls)
        for code in patcher.__code__.co_consts
        if isinstance(code, CodeType) and code.co_name == method
    ]


def _functions_naming(cls: type) -> Iterator[FunctionType]:
    """The functions of other modules than the class's own that have its name in their code."""
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__ == cls.__module__:
            continue
        for function in list(vars(module).values()):
            if type(function) is FunctionType and function.__module__ == module.__name__:  # asks no proxy for its class
                code = function.__code__
                if cls.__name__ in (*code.co_names, *code.co_varnames, *code.co_freevars):
                    yield function


def _parameters(code: CodeType) -> list[str]:
    """Names of a function's parameters, those of ``*args`` and ``**kwargs`` with their stars."""
    count = code.co_argcount + code.co_kwonlyargcount
    names = list(code.co_varnames[:count])
    for flag, stars in ((CO_VARARGS, "*"), (CO_VARKEYWORDS, "**")):
        if code.co_flags & flag:
            names.append(stars + code.co_varnames[count])
            count += 1
    return names


def _backups(cls: type) -> Iterator[str]:
    """Attributes of a class and its bases whose names say that they keep what was there before."""
    for owner in cls.__mro__:
        if owner is not nn.Module and owner is not object:
            yield from (name for name in vars(owner) if BACKUP in name.lower())


def _function(cls: type, name: str) -> FunctionType | None:
    """The function whose code a call of a method runs; None for what is no Python function."""
    found = inspect.getattr_static(cls, name, None)
    function = unwrap(found) if isinstance(found, FunctionType) else None
    return function if isinstance(function, FunctionType) else None
