"""Calls a function as soon as a module has been imported, so that nothing is imported before the program asks for it.

This module is imported when the interpreter starts. It imports nothing itself: a module of the standard library that were loaded here would hide
one of the same name beside the program's script.
"""

import gc
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def after_import(name: str, listener: "Callable[[], None]") -> "Callable[[], None]":
    """Calls ``listener`` once, right after the module ``name`` has been executed; at once if it has been already.

    The module's spec and loader are what they would be without this.

    Returns:
        What stops the waiting, if there still is any.
    """
    if name in sys.modules:
        listener()
        return lambda: None
    finder = _Finder(name, listener)
    sys.meta_path.insert(0, finder)
    return finder.leave


class no_collection:  # noqa: N801  (used as a function is: `with no_collection()`)
    """Keeps Python's garbage collector from running inside: imports make many objects and no garbage, and beside torch's a full collection
    takes as long as importing all of the instruments."""

    def __enter__(self) -> None:
        self._collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self._collects:
            gc.enable()


def keep_out_of_compiler(function: "Callable[..., object]") -> None:
    """Has torch's compiler leave ``function`` and what it calls alone, which Python may call inside of a compiled one; torch must be there."""
    from dtypedoctor._torch_private import FRAME_SKIPPER, skip_frames

    after_import(FRAME_SKIPPER, lambda: skip_frames(function))


class _Finder:
    """Lets the other finders find the module, and puts a loader around theirs that calls the listener."""

    def __init__(self, name: str, listener: "Callable[[], None]") -> None:
        self._name = name
        self._listener = listener

    def find_spec(
        self, fullname: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if fullname != self._name or self not in sys.meta_path:
            return None
        # Only those behind: the ones before have been asked already, and two that wait for one module would ask each other.
        for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None:
                if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader, self._done)  # type: ignore[assignment]
                return spec
        return None

    def leave(self) -> None:
        """Waits no longer."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def _done(self) -> None:
        self.leave()
        self._listener()


class _Loader:
    def __init__(self, inner: object, done: "Callable[[], None]") -> None:
        self._inner = inner
        self._done = done

    def __getattr__(self, name: str) -> object:
        """What others ask a loader for: runpy for the code, importlib.resources for files."""
        if name == "_inner":  # of a copy, which has nothing yet
            raise AttributeError(name)
        return getattr(self._inner, name)

    def create_module(self, spec: "ModuleSpec") -> "ModuleType | None":
        return self._inner.create_module(spec)  # type: ignore[attr-defined]

    def exec_module(self, module: "ModuleType") -> None:
        assert module.__spec__ is not None  # the import system sets it before it calls a loader
        module.__spec__.loader = module.__loader__ = self._inner  # type: ignore[assignment]
        self._inner.exec_module(module)  # type: ignore[attr-defined]
        self._done()


_Loader.exec_module.__code__ = _Loader.exec_module.__code__.replace(
    co_filename="<frozen importlib._bootstrap>", co_name="_call_with_frames_removed"
)
"""Python cuts its import system's frames, known by these names, out of the traceback of a module that raises."""
