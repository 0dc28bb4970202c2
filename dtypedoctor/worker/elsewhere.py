"""Where else a program was at work: in other processes and in code that torch does not know, where nobody watches."""

import os
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dtypedoctor.trace.events import NOT_HERE, WORKED_ELSEWHERE
from dtypedoctor.worker.on_import import after_import

_SYSTEM = (
    "libc.",
    "libm.",
    "libdl.",
    "librt.",
    "libpthread.",
    "libgomp",
    "libcuda",
    "libcud",
    "libnv",
    "libtorch",
    "libc10",
)
"""How the names of libraries begin that every program on torch loads."""
_TOOLS = frozenset(
    {"cc", "g++", "gcc", "git", "ld", "ldconfig", "lscpu", "nvidia-smi", "objdump", "rocminfo", "uname", "which"}
)
"""Programs that libraries start to find out about the system or to build something."""

_STARTERS = ("python", "pypy", "torchrun", "accelerate", "deepspeed")
"""How the names of programs begin that run Python programs."""
_MODULES = frozenset({"compileall", "ensurepip", "http", "pip", "platform", "site", "sysconfig", "tensorboard", "venv"})
"""Modules that are run as programs and compute nothing."""


class Elsewhere:
    """Listens for forks, programs that are started and C libraries that are loaded, from :meth:`begin` to :meth:`end`.

    Python's audit events tell of the latter two; nothing of the program is wrapped for them. Audit hooks cannot be taken back:
    after :meth:`end` this one does nothing.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._listening = False
        self._forks = 0
        self._programs: dict[str, None] = {}
        self._pythons: dict[str, None] = {}
        self._libraries: dict[str, None] = {}
        self._waited_for = _children_waited_for()
        self._had_child = _has_child()

    def begin(self) -> None:
        """Begins to listen; to be called once."""
        self._listening = True
        os.register_at_fork(after_in_parent=self._forked)
        sys.addaudithook(self._heard)

    def torch_is_there(self) -> None:
        """Torch has been imported: its compiler, which may come later, is to leave the listening alone."""
        from dtypedoctor._torch_private import FRAME_SKIPPER, skip_frames

        after_import(FRAME_SKIPPER, lambda: skip_frames(Elsewhere._heard))

    def end(self) -> None:
        """Stops listening."""
        self._listening = False

    def _forked(self) -> None:
        self._forks += self._listening

    def _heard(self, event: str, details: tuple[Any, ...]) -> None:
        if not self._listening:
            return
        if event in ("subprocess.Popen", "os.posix_spawn"):
            name = _base(details[0])
            (self._pythons if _may_work(name, details[1]) else self._programs)[name] = None
        elif event == "os.system":
            self._programs["a shell"] = None
        elif event == "ctypes.dlopen" and details[0] is not None:
            self._libraries[_base(details[0])] = None

    @property
    def libraries(self) -> list[str]:
        """File names of the C libraries that were loaded by ctypes, those that come with torch and the system left out."""
        return [name for name in self._libraries if not name.startswith(_SYSTEM)]

    def processes(self, followed: int = 0) -> Iterator[tuple[str, str]]:
        """What ran in other processes, and why it is not watched; ``followed`` of them leave traces of their own."""
        if self._forks:
            yield f"{self._forks} forked process(es)", NOT_HERE
        if programs := [name for name in self._programs if name not in _TOOLS]:
            yield f"other programs that were started ({', '.join(programs)})", NOT_HERE
        if self._pythons:
            yield f"Python programs that were started ({', '.join(self._pythons)})", WORKED_ELSEWHERE
        elif not followed and not self._forks and not self._programs and self._has_had_children():
            yield "other processes that were started", NOT_HERE

    def threads(self) -> Iterator[tuple[str, str]]:
        """Threads that are still at work when a script's last line is over, and why they are not watched."""
        others = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
        if others:
            yield f"{len(others)} thread(s) that outlive the script's last line", "the watch ends with it"

    def _has_had_children(self) -> bool:
        """Whether there is a first child now, or one was waited for; multiprocessing spawns without an event."""
        return _children_waited_for() != self._waited_for or (_has_child() and not self._had_child)


def _may_work(program: str, arguments: Any) -> bool:
    """Whether a program that is started may compute something with torch: Python, or what starts it, and no tool that comes with them."""
    if not program.startswith(_STARTERS):
        return False
    texts = [os.fsdecode(a) for a in arguments] if isinstance(arguments, (list, tuple)) else [str(arguments)]
    if "-c" in texts[:-1]:
        return "torch" in texts[texts.index("-c") + 1]
    if "-m" in texts[:-1]:
        return texts[texts.index("-m") + 1].partition(".")[0] not in _MODULES
    return not any("compile_worker" in text for text in texts) and "--version" not in texts


def _children_waited_for() -> int:
    """Page faults of all children that were waited for; every process has some."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt


def _has_child() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _base(program: Any) -> str:
    return Path(os.fsdecode(program)).name
