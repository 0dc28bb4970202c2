"""The source text of classes and functions that live in the user's own files, with everything that they use from there.

A module's class in a script cannot be imported by anybody else. What makes it is cut out of the file: the class, what it refers to by name
(other classes, functions, numbers, imports), and what those refer to. The main program around it, which would train, stays behind.
"""

import ast
import builtins
import collections
import functools
import inspect
import logging
import sys
import textwrap
import types
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import torch

from dtypedoctor.instrument.frames import importable, is_own_file
from dtypedoctor.unpatched import unwrap

__all__ = ["SOURCE", "Sources"]

SOURCE = "source"
"""Stands for the module's name in ``source:Block``, of a class whose text is carried along."""

_NEVER_THE_USERS = ("dtypedoctor", "torch", "transformers", "peft", "bitsandbytes", "accelerate", "trl")
"""Packages that are named wherever they lie, such as beside a program or in a folder of ``PYTHONPATH``."""
_LITERALS = (bool, int, float, complex, str, bytes, type(None), type(...))


class Sources:
    """Collects source text. Classes of libraries are named as they are; those of the user's files are carried along."""

    def __init__(self) -> None:
        self._parts: dict[str, str] = {}
        """By name what defines it, in an order in which it can be executed."""
        self._known: dict[str, Any] = {}
        """By name what it stands for."""
        self._modules: dict[str, set[str]] = {}
        """By name of a module of the user's what is used of it: such a module is not there elsewhere."""
        self.state: dict[str, Any] = {}
        """What no text makes, by the name that it has in the text: ``Class.attribute`` or a global variable."""

    @property
    def text(self) -> str:
        """The program that defines everything that was named; empty where all of it is importable."""
        imports = [part for part in self._parts.values() if part.startswith(("import ", "from "))]
        rest = [part for part in self._parts.values() if part not in imports]
        for name, used in self._modules.items():
            held = ", ".join(f"{one}={one}" for one in sorted(used) if one in self._parts or one in self.state)
            rest.append(f"{name} = types.SimpleNamespace({held})")
            imports.append("import types")
        return "\n".join(sorted(set(imports))) + "\n\n" + "\n\n".join(rest) + "\n" if rest else ""

    @property
    def classes(self) -> list[str]:
        """Names of the classes that are carried along."""
        return [name for name, thing in self._known.items() if isinstance(thing, type) and is_the_users(thing)]

    def name_of(self, thing: Any) -> str:
        """``module:qualified.name`` of a class or function; ``source:Name`` where its text is carried along.

        Raises:
            TypeError: it can neither be imported nor be cut out of its file.
        """
        if not is_the_users(thing):
            return importable(thing)
        if isinstance(thing, types.FunctionType) and thing.__name__ == "<lambda>":
            return f"{SOURCE}:{self._add_lambda(thing)}"
        outermost = _outermost(thing)
        self._add(outermost.__name__, outermost)
        path = thing.__qualname__.rpartition("<locals>.")[2] if outermost is not thing else outermost.__name__
        return f"{SOURCE}:{path}"

    def _add(self, name: str, thing: Any) -> None:
        """Makes ``name`` stand for ``thing``.

        Raises:
            TypeError: it stands for something else already, or nothing can be said of it.
        """
        if name in self._known:
            if self._known[name] is not thing:
                raise TypeError(f"two things are called {name}")
            return
        self._known[name] = thing
        if isinstance(thing, types.ModuleType):
            self._parts[name] = f"import {thing.__name__} as {name}" if thing.__name__ != name else f"import {name}"
        elif isinstance(thing, (type, types.FunctionType)) and is_the_users(thing):
            self._add_text(name, thing)
        elif isinstance(thing, (torch.dtype, torch.device, *_LITERALS, tuple, list, dict, set, frozenset)):
            # A constant; what has no literal is state.
            try:
                self._parts[name] = f"{name} = {_literal(thing)}"
            except TypeError:
                self.state[name] = thing
                return
            if "torch." in self._parts[name]:
                self._add("torch", torch)
        else:
            self._add_import(name, thing)

    def _add_text(self, name: str, thing: Any) -> None:
        outermost = _outermost(thing)
        if outermost is not thing or outermost.__name__ != name:
            self._add(outermost.__name__, outermost)
            path = thing.__qualname__.rpartition("<locals>.")[2]
            if path != name:
                self._parts[name] = f"{name} = {path}"
            return
        if isinstance(thing, type) and thing.__bases__ == (tuple,) and hasattr(thing, "_fields"):
            self._add("collections", collections)
            self._parts[name] = f"{name} = collections.namedtuple({name!r}, {list(thing._fields)!r})"
            return
        try:
            text = _text_of(thing)
            tree = ast.parse(text)
        except (OSError, SyntaxError, TypeError) as error:
            raise TypeError(f"the source of {name} is not there: {error}") from None
        self._add_used(thing, tree, name)
        self._parts[name] = text.rstrip()
        if isinstance(thing, type):
            self.state |= {f"{name}.{held}": value for held, value in vars(thing).items() if _is_state(value)}

    def _add_used(self, thing: Any, tree: ast.AST, name: str) -> None:
        """Adds what the text of ``thing``, which is called ``name``, refers to."""
        around = dict(_around(thing))
        for used in _names_in(tree):
            if used not in around or used == name:
                continue
            if isinstance(around[used], types.ModuleType) and _is_module_of_the_user(around[used]):
                self._add_module(used, around[used], tree)
            else:
                self._add(used, around[used])

    def _add_module(self, name: str, module: types.ModuleType, tree: ast.AST) -> None:
        """Adds what ``tree`` uses of a module of the user's that is called ``name`` in it."""
        if self._known.setdefault(name, module) is not module:
            raise TypeError(f"two things are called {name}")
        attributes = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
        for used in {node.attr for node in attributes if isinstance(node.value, ast.Name) and node.value.id == name}:
            if hasattr(module, used):
                self._add(used, getattr(module, used))
                self._modules.setdefault(name, set()).add(used)

    def _add_lambda(self, function: types.FunctionType) -> str:
        """Gives a lambda expression a name.

        Raises:
            TypeError: its text cannot be told from that of another one.
        """
        known = [name for name, thing in self._known.items() if thing is function]
        if known:
            return known[0]
        # Its expression in the program's text, with the defaults as literals.
        try:
            tree = ast.parse("".join(inspect.findsource(function)[0]))
        except (OSError, SyntaxError) as error:
            raise TypeError(f"the source of a lambda expression is not there: {error}") from None
        code = function.__code__
        found = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Lambda)
            and node.lineno <= code.co_firstlineno <= (node.end_lineno or node.lineno)
            and [argument.arg for argument in node.args.args] == list(code.co_varnames[: code.co_argcount])
        ]
        if len(found) != 1:
            raise TypeError(f"{len(found)} lambda expressions stand in line {code.co_firstlineno}")
        defaults = [ast.parse(_literal(value), mode="eval").body for value in function.__defaults__ or ()]
        found[0].args.defaults = defaults
        node = found[0]
        name = f"function_{len(self._known)}"
        self._known[name] = function
        self._add_used(function, node, name)
        self._parts[name] = f"{name} = {ast.unparse(node)}"
        return name

    def _add_import(self, name: str, thing: Any) -> None:
        """Something of a library. A tensor, a configuration and an object of the user's is state; another one is missed only where it is used."""
        try:
            module, _, path = importable(thing).partition(":")
        except TypeError:
            module = path = ""
        if isinstance(thing, logging.Logger):
            self._add("logging", logging)
            self._parts[name] = f"{name} = logging.getLogger({thing.name!r})"
        elif not path and (
            isinstance(thing, torch.Tensor) or is_the_users(type(thing)) or hasattr(type(thing), "from_dict")
        ):
            self.state[name] = thing
        if "." not in path and getattr(sys.modules.get(module), path, None) is thing:
            self._parts[name] = f"from {module} import {path}" + (f" as {name}" if path != name else "")


def _text_of(thing: Any) -> str:
    """The source of a class or function.

    Raises:
        OSError: it is not there.
    """
    try:
        return textwrap.dedent(inspect.getsource(thing))
    except (OSError, TypeError):  # a class whose module has no file, such as one of a notebook's cell
        method = next(_functions_of(thing), None)
        if not isinstance(thing, type) or method is None:
            raise
        lines = inspect.findsource(method)[0]
        wanted, at = thing.__qualname__.rpartition(".")[2], method.__code__.co_firstlineno
        for node in ast.walk(ast.parse("".join(lines))):
            if isinstance(node, ast.ClassDef) and node.name == wanted and node.lineno <= at <= (node.end_lineno or at):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                return textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
        raise


def _is_state(value: Any) -> bool:
    """Whether an attribute of a class is, or holds, a tensor that the program has put there."""
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, torch.Tensor) or (isinstance(value, list) and any(map(_is_state, value)))


def is_the_users(thing: Any) -> bool:
    """Whether a class or function stands in the program or in a module beside it, and in no library."""
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    return module is not None and _is_module_of_the_user(module)


def _is_module_of_the_user(module: types.ModuleType) -> bool:
    if module.__name__ == "__main__":
        return True
    file = getattr(module, "__file__", None)
    if file is None or module.__name__.partition(".")[0] in _NEVER_THE_USERS:
        return False
    return is_own_file(file) and not _is_installed(module.__name__.partition(".")[0], file)


@functools.cache
def _is_installed(package: str, file: str) -> bool:
    """Whether the metadata of a distribution of this name lie beside the package, as where a wheel was unpacked."""
    beside = next((folder.parent for folder in Path(file).parents if folder.name == package), None)
    return beside is not None and next(beside.glob(f"{package}-*.dist-info"), None) is not None


def _outermost(thing: Any) -> Any:
    """The class around a nested class or a method; else what it is."""
    path = thing.__qualname__.rpartition("<locals>.")[2]
    if "." not in path or "<locals>" in thing.__qualname__:
        return thing
    return getattr(sys.modules[thing.__module__], path.partition(".")[0], thing)


def _names_in(tree: ast.AST) -> Iterator[str]:
    """Names that are read, each once."""
    read = (node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    return iter(dict.fromkeys(name for name in read if not hasattr(builtins, name)))


def _around(thing: Any) -> Iterator[tuple[str, Any]]:
    """What the names in the text of a class or function stand for: those of its module, then those of the functions around it."""
    yield from vars(sys.modules[thing.__module__]).items()
    for function in _functions_of(thing):
        yield from function.__globals__.items()
    for function in _functions_of(thing):
        found = {}
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                found[name] = cell.cell_contents
            except ValueError:  # not bound yet
                continue
        found.pop("__class__", None)
        yield from found.items()


def _functions_of(thing: Any) -> Iterator[types.FunctionType]:
    for held in [thing] if isinstance(thing, types.FunctionType) else vars(thing).values():
        plain = unwrap(held) if callable(held) else getattr(held, "__func__", getattr(held, "fget", None))
        if isinstance(plain, types.FunctionType) and plain.__module__ == thing.__module__:
            yield plain


def _literal(value: Any) -> str:
    """An expression for a plain value.

    Raises:
        TypeError: it holds something else.
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if type(value) in (tuple, list, set, frozenset):
        inside = "".join(f"{_literal(item)}, " for item in value)
        return f"{type(value).__name__}(({inside}))" if not isinstance(value, list) else f"[{inside.rstrip(', ')}]"
    if isinstance(value, torch.device):
        return f"torch.device({str(value)!r})"
    if isinstance(value, float) and not isfinite(value):
        return f"float({str(value)!r})"
    if isinstance(value, (torch.dtype, *_LITERALS)):
        return repr(value)
    raise TypeError(f"a {type(value).__name__} has no literal")
