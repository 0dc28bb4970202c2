"""What this package needs of Python while another program runs, so that it is not that program's replacement.

``json.dumps = orjson.dumps`` and ``builtins.print = log`` are ordinary code. What stands here was bound when this module was
imported, or does not go through the names that programs replace.

Hooks of the interpreter cannot be taken out again: there is one of each kind in a process, however often the process is watched. Whoever listens is
held weakly, so a recording that is over is neither called nor kept in memory.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from inspect import unwrap
from io import FileIO
from json.decoder import JSONDecoder
from json.encoder import JSONEncoder
from os import PathLike, getpid, listdir
from time import monotonic, perf_counter, process_time, sleep, thread_time, time_ns
from types import MethodType
from typing import Any
from weakref import ref

__all__ = [
    "from_json",
    "getpid",
    "listdir",
    "monotonic",
    "perf_counter",
    "process_time",
    "read_text",
    "sleep",
    "thread_time",
    "time_ns",
    "to_json",
    "unseen_by_warnings",
    "unwrap",
]


_INTERNAL = " (importlib._bootstrap)"
"""What the warnings of Python look for in the name of a file: frames of such a one are none that ``stacklevel`` counts."""


def unseen_by_warnings(function: Any) -> Any:
    """Decorates a function that stands between two of the program: its warnings are attributed to the same lines as without it."""
    code = function.__code__
    function.__code__ = code.replace(co_filename=code.co_filename + _INTERNAL)
    return function


class _Encoder(JSONEncoder):
    default = JSONEncoder.default
    encode = JSONEncoder.encode
    iterencode = JSONEncoder.iterencode


class _Decoder(JSONDecoder):
    decode = JSONDecoder.decode
    raw_decode = JSONDecoder.raw_decode


_compact = _Encoder(separators=(",", ":"), allow_nan=False).encode
_indented = _Encoder(indent=2, allow_nan=False).encode


def _refuse(constant: str) -> Any:
    raise ValueError(f"not JSON: {constant}")


_read = _Decoder(parse_constant=_refuse).decode


def to_json(value: Any, *, indented: bool = False) -> str:
    """``value`` as JSON in ASCII, on one line or indented by two.

    Raises:
        ValueError: it holds NaN or inf.
        TypeError: it holds something that JSON has not.
    """
    return _indented(value) if indented else _compact(value)


def from_json(text: str | bytes) -> Any:
    """The value of a JSON text, of bytes in UTF-8.

    Raises:
        ValueError: it is not JSON; NaN and Infinity are not.
    """
    return _read(text if isinstance(text, str) else str(text, "utf-8"))


def read_text(path: str | PathLike[str]) -> str:
    """What stands in a file, in UTF-8.

    Raises:
        OSError: it cannot be read.
        ValueError: it is not UTF-8.
    """
    with FileIO(os.fspath(path)) as file:
        return str(file.readall(), "utf-8")


_Method = Callable[..., object]

_listening: dict[str, "list[tuple[ref[object], _Method]]"] = {
    "before": [],
    "after_in_parent": [],
    "after_in_child": [],
    "audit": [],
}
_heard: tuple[str, ...] = ()
"""How the names of the audit events begin that anybody has asked for."""
_is_heard: Any = {}
"""Whether an event is one of these, by its name. Importing torch makes 17,000 others, and each hash of a parameter one."""


def at_fork(
    *, before: _Method | None = None, after_in_parent: _Method | None = None, after_in_child: _Method | None = None
) -> None:
    """Has bound methods called around each fork of this process, as ``os.register_at_fork`` does, while their objects live."""
    _register_at_fork()
    for when, method in (("before", before), ("after_in_parent", after_in_parent), ("after_in_child", after_in_child)):
        if method is not None:
            _listen(when, method)


def at_audit(method: Callable[[str, tuple[Any, ...]], object], *events: str) -> None:
    """Has a bound method called with audit events and their arguments, as ``sys.addaudithook`` does, while its object lives.

    Args:
        method: may be called with other events, too.
        events: how the names of those begin that it needs.
    """
    global _heard
    _heard = tuple({*_heard, *events})
    _is_heard.clear()
    _add_audit_hook()
    _listen("audit", method)


def audited(event: str, details: tuple[Any, ...]) -> None:
    """The audit hook of this process; what a method raises goes on to the program."""
    if _is_heard is None:  # the interpreter takes modules apart
        return
    is_heard = _is_heard.get(event)
    if is_heard is None:
        is_heard = _is_heard[event] = event.startswith(_heard)
    if is_heard:
        for method in _living("audit"):
            method(event, details)


def _listen(when: str, method: Any) -> None:
    """Notes the object and the function of a bound method.

    Python's ``WeakMethod`` is told in Python that its object has died, and what a signal handler raises there goes nowhere.
    """
    _listening[when] = [each for each in _listening[when] if each[0]() is not None]
    _listening[when].append((ref(method.__self__), method.__func__))


def _living(when: str) -> list[_Method]:
    owned = ((owner(), function) for owner, function in _listening[when])
    return [MethodType(function, owner) for owner, function in owned if owner is not None]


def _call(when: str) -> None:
    for method in _living(when):
        method()


@cache
def _register_at_fork() -> None:
    os.register_at_fork(
        before=lambda: _call("before"),
        after_in_parent=lambda: _call("after_in_parent"),
        after_in_child=lambda: _call("after_in_child"),
    )


@cache
def _add_audit_hook() -> None:
    sys.addaudithook(audited)
