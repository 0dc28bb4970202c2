"""Hooks of the interpreter that cannot be taken out again: one of each kind in a process, however often the process is watched.

Whoever listens is held weakly, so a recording that is over is neither called nor kept in memory.
"""

import os
import sys
from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any
from weakref import ref

_Method = Callable[..., object]

_listening: dict[str, "list[tuple[ref[object], _Method]]"] = {
    "before": [],
    "after_in_parent": [],
    "after_in_child": [],
    "audit": [],
}
_heard: tuple[str, ...] = ()
"""How the names of the audit events begin that anybody has asked for. Importing torch makes 17,000 others."""


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
    _add_audit_hook()
    _listen("audit", method)


def audited(event: str, details: tuple[Any, ...]) -> None:
    """The audit hook of this process; what a method raises goes on to the program."""
    heard = _heard
    if heard and event.startswith(heard):  # None once the interpreter takes modules apart
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
