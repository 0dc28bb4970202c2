"""A process of its own from which children are forked: libraries are imported once, and no thread of the tests is copied.

A fork of the process that runs the tests would inherit the locks of OpenMP's threads, but not the threads: the first
parallel loop in the child then waits for ever, as soon as any test has computed something before.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection
from typing import Any

SLOW_PARTS = {
    "torch": (
        "torch",
        "torch._dynamo",
        "torch._subclasses.schema_check_mode",
        "dtypedoctor.worker.script",
        "dtypedoctor.worker.process_watch",
    ),
    "transformers": (
        "transformers.generation.utils",
        "transformers.trainer",
        "transformers.models.llama.modeling_llama",
    ),
    "trl": ("trl.trainer.sft_trainer", "trl.trainer.dpo_trainer", "trl.trainer.grpo_trainer"),
}
"""Modules that a library imports on first use, seconds each, and those of this package that every script is run with."""


def preload(libraries: frozenset[str]) -> None:
    """Import in the nursery what the children will need. Raises ImportError for what cannot be imported there."""
    wanted = sorted(libraries | {"torch"})
    _call(("import", tuple(name for library in wanted for name in SLOW_PARTS.get(library, (library,)))))


@dataclass(slots=True)
class Child:
    """A process that was forked from the nursery; one lives at a time."""

    pid: int
    code: int | None = None
    """Exit code once it was waited for."""

    def over(self) -> bool:
        """Whether it has ended."""
        return self.code is not None or _nursery().poll()

    def wait(self) -> int:
        """Its exit code, the negative number of a signal; waits for its end."""
        if self.code is None:
            self.code = int(_nursery().recv())
        return self.code


_last = Child(pid=0, code=0)


def fork(function: Callable[..., Any], *arguments: object) -> Child:
    """Run ``function`` of an importable module in a new child; it exits with the integer returned, with 1 if it raises.

    It has torch and what watches scripts imported, whether or not a test has asked for more.
    """
    global _last
    preload(frozenset())
    _last = Child(pid=int(_call(("fork", (function, arguments)))))
    return _last


def _call(request: tuple[str, Any]) -> Any:
    if _last.code is None:  # a test was ended while it waited
        with suppress(ProcessLookupError):
            os.kill(_last.pid, signal.SIGKILL)
        _last.wait()
    nursery = _nursery()
    nursery.send(request)
    answer = nursery.recv()
    if isinstance(answer, Exception):
        raise answer
    return answer


@cache
def _nursery() -> Connection:
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_serve, args=(there,))
    process.start()
    there.close()
    atexit.register(process.join)
    atexit.register(here.close)  # runs before the join: the end of the pipe ends the nursery
    return here


def _serve(requests: Connection) -> None:
    """The nursery's side: imports and forks as it is told, until nobody is left who could ask."""
    while True:
        try:
            kind, content = requests.recv()
        except EOFError:
            return
        if kind == "import":
            requests.send(_imported(content))
            continue
        child = os.fork()
        if child == 0:
            _live(*content)
        requests.send(child)
        requests.send(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))


def _imported(names: tuple[str, ...]) -> ImportError | None:
    try:
        for name in names:
            importlib.import_module(name)
    except ImportError as error:
        return error
    gc.collect()
    gc.freeze()  # no child searches all of this for garbage
    return None


def _live(function: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    code = 1
    try:
        code = int(function(*arguments) or 0)
    except BaseException:  # noqa: BLE001 - the one who asked sees it in what the test prints
        traceback.print_exc()
    finally:  # nothing may return into the nursery's loop
        os._exit(code)
