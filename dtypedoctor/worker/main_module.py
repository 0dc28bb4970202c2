"""Runs a program as ``python script.py``, ``python -m module``, ``python -c text`` and ``python -`` do.

When it begins, more of the standard library has been imported than with ``python script.py``. Where the program has a module
of such a name, it gets that one, and this package keeps the real one (:func:`let_through`).
"""

import builtins
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from importlib.util import MAGIC_NUMBER, find_spec
from types import CodeType, ModuleType
from typing import Any

from dtypedoctor.unpatched import unseen_by_warnings

at_start = frozenset(sys.modules)
"""Names of the modules that the interpreter had imported before this package was."""


class NotRunnableError(Exception):
    """There is no such script or module; the message is what Python itself would say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is to run as ``__main__``.

    Attributes:
        code: the compiled program.
        argv0: what ``sys.argv[0]`` will be.
        path0: what is put in front of ``sys.path``, one folder or none.
        attributes: the attributes of the module ``__main__``.
    """

    code: CodeType
    argv0: str
    path0: list[str]
    attributes: dict[str, Any]


def program(path: str | None, module: str | None, code: str | None) -> Program:
    """What ``python path``, ``python -m module`` or ``python -c code`` would run, or ``python -`` with ``code`` on standard input.

    Raises:
        NotRunnableError: there is no such program.
        SyntaxError: it is not Python.
    """
    if module is not None:
        return _module(module)
    if code is not None:
        return _text(code, argv0=path or "-c")
    assert path is not None  # the scenario has been checked
    return _file(path)


def _text(code: str, *, argv0: str) -> Program:
    """Source text that lies in no file. Python names standard input where it would name one, and gives `-c` no name."""
    name = {"__file__": "<stdin>", "__cached__": None} if argv0 == "-" else {}
    attributes = name | {"__package__": None, "__spec__": None, "__loader__": BuiltinImporter}
    filename = "<stdin>" if argv0 == "-" else "<string>"
    return Program(code=_compiled(code, filename), argv0=argv0, path0=_unless_safe(""), attributes=attributes)


def _file(path: str) -> Program:
    where = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    if _is_package(where):
        spec = PathFinder.find_spec("__main__", [where])
        if spec is None:
            raise NotRunnableError(f"can't find '__main__' module in {path!r}")
        return _from_spec(spec, argv0=path, path0=[where])  # even where the path is to be safe
    try:
        with io.open_code(where) as file:
            source = file.read()
    except OSError as error:
        raise NotRunnableError(f"can't open file {where!r}: {error.strerror}") from None
    compiled = where.endswith(".pyc") or source.startswith(MAGIC_NUMBER[:2])
    loader = SourcelessFileLoader("__main__", where) if compiled else SourceFileLoader("__main__", where)
    code = loader.get_code("__main__") if compiled else _compiled(source, where)
    assert code is not None  # a loader of files has one, or raises
    return Program(
        code=code,
        argv0=path,
        path0=_unless_safe(os.path.dirname(os.path.realpath(where))),
        attributes={
            "__file__": where,
            "__cached__": None,
            "__package__": None,
            "__spec__": None,
            "__loader__": loader,
        },
    )


def _unless_safe(folder: str) -> list[str]:
    return [] if sys.flags.safe_path else [folder]


def _compiled(source: str | bytes, filename: str) -> CodeType:
    return compile(source, filename, "exec", dont_inherit=True)


def _module(name: str) -> Program:
    """The program in a module, or in ``__main__`` of a package, as ``python -m``. Imports the packages that hold it."""
    looked_in = [] if sys.flags.safe_path else [os.getcwd()]
    sys.path[:0] = looked_in  # where `python -m` looks first
    let_through(looked_in, at_start)
    sys.argv[0] = "-m"  # as Python has it while it looks
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise NotRunnableError(f"Error while finding module specification for {name!r} ({error})") from error
    finally:
        del sys.path[: len(looked_in)]
    if spec is None:
        raise NotRunnableError(f"No module named {name}")
    return _from_spec(spec, argv0=spec.origin or name, path0=looked_in)


def _from_spec(spec: ModuleSpec, *, argv0: str, path0: list[str]) -> Program:
    loader = spec.loader
    get_code = getattr(loader, "get_code", None)  # not every loader that has it says so by its class
    code: CodeType | None = get_code(spec.name) if get_code is not None else None
    if code is None:
        raise NotRunnableError(f"No code object available for {spec.name}")
    return Program(
        code=code,
        argv0=argv0,
        path0=path0,
        attributes={
            "__file__": spec.origin,
            "__cached__": spec.cached,
            "__package__": spec.parent,
            "__spec__": spec,
            "__loader__": loader,
        },
    )


@unseen_by_warnings
def run(program: Program, arguments: Sequence[str]) -> None:
    """Runs ``program`` as the module ``__main__``; whatever it raises leaves this function."""
    main = ModuleType("__main__")
    vars(main).update(program.attributes, __builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    sys.argv[:] = [program.argv0, *arguments]
    sys.path[:0] = program.path0
    let_through(sys.path[: _standard_library()], at_start)
    exec(program.code, vars(main))  # noqa: S102  (running it is what this module is for)


def _standard_library() -> int:
    """Where the standard library stands on ``sys.path``."""
    home = os.path.dirname(os.__file__)
    return sys.path.index(home) if home in sys.path else len(sys.path)


def _is_package(path: str) -> bool:
    """Whether Python would run ``__main__.py`` inside of ``path``: a directory or an archive, whatever its name is."""
    for hook in sys.path_hooks:
        try:
            hook(path)
        except ImportError:
            continue
        return True
    return False


def let_through(folders: Sequence[str], at_start: frozenset[str]) -> None:
    """Forgets each module of the standard library that this package has imported and that ``folders`` have one of their own for.

    Args:
        folders: what stands before the standard library on ``sys.path``.
        at_start: names of the modules that the interpreter itself had imported.
    """
    imported = {name.partition(".")[0] for name in sys.modules}
    kept = {name.partition(".")[0] for name in at_start} | set(sys.builtin_module_names)
    for name in imported & sys.stdlib_module_names - kept:
        found = PathFinder.find_spec(name, list(folders))
        if found is None or found.loader is None:  # a folder without code does not hide a module that comes later
            continue
        for one in [one for one in sys.modules if one == name or one.startswith(name + ".")]:
            del sys.modules[one]
