"""Runs a script or a module as ``python script.py`` and ``python -m module`` do."""

import builtins
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import Any


class NotRunnableError(Exception):
    """There is no such script or module; the message is what Python itself would say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What is to run as ``__main__``.

    Attributes:
        code: the compiled program.
        argv0: what ``sys.argv[0]`` will be.
        path0: what is put in front of ``sys.path``.
        attributes: the attributes of the module ``__main__``.
    """

    code: CodeType
    argv0: str
    path0: str
    attributes: dict[str, Any]


def script(path: str) -> Program:
    """The program in a file, or ``__main__.py`` in a directory or zip archive.

    Raises:
        NotRunnableError: it cannot be read.
        SyntaxError: it is not Python.
    """
    where = os.path.abspath(path)
    if not os.path.isfile(where) or _is_archive(where):
        spec = PathFinder.find_spec("__main__", [where])
        if spec is None:
            raise NotRunnableError(f"can't find '__main__' module in {path!r}")
        return _from_spec(spec, argv0=path, path0=where)
    try:
        with io.open_code(where) as file:
            source = file.read()
    except OSError as error:
        raise NotRunnableError(f"can't open file {where!r}: {error.strerror}") from None
    return Program(
        code=compile(source, where, "exec", dont_inherit=True),
        argv0=path,
        path0=os.path.dirname(os.path.realpath(where)),
        attributes={
            "__file__": where,
            "__cached__": None,
            "__package__": None,
            "__spec__": None,
            "__loader__": SourceFileLoader("__main__", where),
        },
    )


def module(name: str) -> Program:
    """The program in a module, or in ``__main__`` of a package, as ``python -m``. Imports the packages that hold it.

    Raises:
        NotRunnableError: there is no such module, or it is not Python code.
        SyntaxError: it is not Python.
    """
    sys.path.insert(0, os.getcwd())  # where `python -m` looks first
    sys.argv[0] = "-m"  # as Python has it while it looks
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name += ".__main__"
            spec = find_spec(name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise NotRunnableError(f"Error while finding module specification for {name!r} ({error})") from error
    finally:
        del sys.path[0]
    if spec is None:
        raise NotRunnableError(f"No module named {name}")
    return _from_spec(spec, argv0=spec.origin or name, path0=os.getcwd())


def _from_spec(spec: ModuleSpec, *, argv0: str, path0: str) -> Program:
    loader = spec.loader
    code = loader.get_code(spec.name) if isinstance(loader, InspectLoader) else None
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


def run(program: Program, arguments: Sequence[str]) -> None:
    """Runs ``program`` as the module ``__main__``; whatever it raises leaves this function."""
    main = ModuleType("__main__")
    vars(main).update(program.attributes, __builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    sys.argv[:] = [program.argv0, *arguments]
    if not sys.flags.safe_path:
        sys.path.insert(0, program.path0)
    exec(program.code, vars(main))  # noqa: S102  (running it is what this module is for)


def _is_archive(path: str) -> bool:
    """Whether Python would run ``__main__.py`` inside of the file."""
    from zipfile import is_zipfile

    return not path.endswith(".py") and is_zipfile(path)
