"""Starts Python programs by forking a process that has imported torch and the trainers, instead of a fresh interpreter.

Importing them costs two to eight seconds for each program that a test starts; a fork costs milliseconds. The program is run as
``python script.py``, ``python -m module`` or ``python -c text`` would: with its own streams, environment, working directory, process
group, signals, ``sys.path``, ``__main__`` and exit status, and it is a child of whoever starts it. The programs that it starts itself
are forked, too, while it has one thread; those of torchrun, which has several, by a process that stays beside it. What differs: modules of these libraries are imported already, and ``sys.flags`` is that of the tests.

For tests of what is found. Those of how a program is started, what it sees of itself, and what it costs use fresh interpreters.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import builtins
import ctypes
import gc
import importlib
import io
import itertools
import json
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import find_spec, module_from_spec
from multiprocessing import forkserver, process, resource_tracker, util
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from forked_script import wait_for
from nursery import fork, preload

LIBRARIES = frozenset({"transformers", "peft", "trl", "bitsandbytes", "accelerate", "datasets"})
SAFE, SAFE_PATH = "-P", "PYTHONSAFEPATH"
"""Leave the program's folder out of ``sys.path``."""
LAUNCHERS = frozenset({"torch.distributed.run", "torchrun"})
"""Programs that have threads when they start others."""
CHILD_SUBREAPER = 36
"""``PR_SET_CHILD_SUBREAPER`` of ``prctl``: who is left by its parent becomes a child of this process."""
_fork_exec = _posixsubprocess.fork_exec
_forker: socket.socket | None = None
"""Leads to the process that forks for this one."""


def run(arguments: Sequence[str], folder: Path, environment: Mapping[str, str], streams: Path) -> int:
    """Runs ``python ARGUMENTS`` in ``folder``; its output lies in ``streams``, in ``out`` and ``err``. Its exit status.

    Raises:
        TimeoutError: it takes longer than the tests' limit.
    """
    preload(LIBRARIES)
    child = fork(_live, [sys.executable, *arguments], folder, dict(environment), streams)
    wait_for(child, streams)
    return child.wait()


def _live(words: list[str], folder: Path, environment: dict[str, str], streams: Path) -> NoReturn:
    """The child's side of :func:`run`."""
    given, out, err = os.open(os.devnull, os.O_RDONLY), _new(streams / "out"), _new(streams / "err")
    subprocess._fork_exec = _posixsubprocess.fork_exec = _started  # type: ignore[attr-defined]
    os.execv = _executed
    _move_streams((given, out, err))
    _close_others(lambda descriptor: False)
    os.chdir(folder)
    _become(words, environment)


def _new(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


def _started(*request: Any) -> int:
    """In place of ``fork_exec``, whose arguments it takes: the process id of the new child."""
    (args, _, close_fds, keep, cwd, environment, given, _, _, out, _, err, _, failure, _, session, group, *own) = (
        request
    )
    words = [os.fsdecode(word) for word in args]
    keep = set(keep) - {failure}  # this end of a pipe is closed as soon as a program runs
    if not _is_program(words) or any(one is not None for one in (*own[:3], own[4])):
        return _fork_exec(*request)
    named = None if environment is None else [os.fsdecode(line).split("=", 1) for line in environment]
    variables = dict(os.environ) if named is None else dict(named)
    if len(os.listdir("/proc/self/task")) > 1:  # a fork would have their locks, and not them
        if _forker is None or keep or not close_fds:
            return _fork_exec(*request)
        return _forked_for_us(
            _forker, (words, os.fspath(cwd or os.getcwd()), variables, session, group), (given, out, err)
        )
    child = os.fork()
    if child == 0:
        _move_streams((given, out, err))
        _close_others(lambda descriptor: descriptor in keep or (not close_fds and os.get_inheritable(descriptor)))
        _begin(words, os.fspath(cwd or os.getcwd()), variables, session, group)
    return child


def _begin(words: list[str], folder: str, environment: dict[str, str], session: bool, group: int) -> NoReturn:
    """Runs the program in this new child."""
    if session:
        os.setsid()
    if group >= 0:
        os.setpgid(0, group)
    os.chdir(folder)
    _become(words, environment)


def _keep_forker() -> None:
    """Leaves a process beside this one that stays without threads, and can so be forked when this one has some."""
    global _forker
    _forker, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ctypes.CDLL(None).prctl(CHILD_SUBREAPER, 1)
    if os.fork() == 0:
        _forker.close()
        _fork_for_others(theirs)
    theirs.close()


def _forked_for_us(forker: socket.socket, program: tuple[Any, ...], streams: tuple[int, int, int]) -> int:
    """The process id of a new child of this process, which another one has forked."""
    places = [place for place, descriptor in enumerate(streams) if descriptor >= 0]
    socket.send_fds(forker, [pickle.dumps((program, places))], [streams[place] for place in places])
    return int(forker.recv(32))


def _fork_for_others(requests: socket.socket) -> NoReturn:
    """Forks until nobody is left who could ask. A child whose parent has ended becomes one of the process that has asked."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, 1 << 20, 3)
        if not data:
            os._exit(0)
        program, places = pickle.loads(data)
        told, tell = os.pipe()
        parent = os.fork()
        if parent == 0:
            between, child = os.getpid(), os.fork()
            if child:
                os.write(tell, str(child).encode())
                os._exit(0)
            while os.getppid() == between:  # a program may ask to be ended with its parent
                time.sleep(0.001)
            given = dict(zip(places, descriptors, strict=True))
            _move_streams((given.get(0, -1), given.get(1, -1), given.get(2, -1)))
            _close_others(lambda descriptor: False)
            _begin(*program)
        os.waitpid(parent, 0)
        requests.send(os.read(told, 32))
        for descriptor in (told, tell, *descriptors):
            os.close(descriptor)


def _executed(path: str, words: Sequence[str]) -> NoReturn:
    if not _is_program(words):
        os.execve(path, words, os.environ)
    _close_others(os.get_inheritable)
    _become(list(words), dict(os.environ))


def _is_program(words: Sequence[str]) -> bool:
    """Whether these are an interpreter and a program, with no options that need an interpreter of its own."""
    if words[0] != sys.executable:
        return False
    rest = _program_of(words)
    return bool(rest) and (rest[0] in ("-c", "-m") or not rest[0].startswith("-"))


def _program_of(words: Sequence[str]) -> list[str]:
    """A command without the interpreter and those of its options that a fork can heed."""
    return list(itertools.dropwhile({SAFE, "-B", "-u"}.__contains__, words[1:]))


def _move_streams(streams: tuple[int, int, int]) -> None:
    """Puts these descriptors where standard streams are; -1 leaves one as it is."""
    copies = [os.dup(one) if one >= 0 else -1 for one in streams]
    for descriptor, copy in enumerate(copies):
        if copy >= 0:
            os.dup2(copy, descriptor)
            os.close(copy)


def _close_others(is_kept: Callable[[int], bool]) -> None:
    """Closes every descriptor that the program would not find open."""
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        try:
            if descriptor > 2 and not is_kept(descriptor):
                os.close(descriptor)
        except OSError:  # that of the listing itself
            continue


def _become(words: list[str], environment: dict[str, str]) -> NoReturn:
    """Runs the program in this process, as far as possible as a fresh interpreter would, and ends."""
    gc.freeze()  # files that whoever was forked has open must not be closed: their descriptors belong to others now
    weakref.finalize._registry.clear()  # type: ignore[attr-defined]
    _forget_processes()
    os.environ.clear()
    os.environ.update(environment)
    _forget_handlers()
    _open_streams()
    rest = _program_of(words)
    safe = SAFE in words[: -len(rest)] or bool(environment.get(SAFE_PATH))
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __spec__=None, __annotations__={})
    sys.excepthook, sys.orig_argv = sys.__excepthook__, words
    named = [os.path.abspath(one) for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one]
    sys.path[:] = [*named, *_interpreters_path()]
    importlib.invalidate_caches()
    _numbers_of_its_own(environment)
    if not LAUNCHERS.isdisjoint(map(os.path.basename, rest[:2])):
        _keep_forker()
    sys.modules.pop("sitecustomize", None)
    for name in [name for name in sys.modules if name == "dtypedoctor.worker.on_import"]:
        del sys.modules[name]  # by which the hook knows that it is there already
    if find_spec("sitecustomize") is not None:
        importlib.import_module("sitecustomize")
    _end(lambda: _run(rest, main, safe=safe))


def _forget_processes() -> None:
    """This process belongs to no other of ``multiprocessing``, and knows none."""
    util._finalizer_registry.clear()
    forkserver._forkserver.__init__()
    resource_tracker._resource_tracker.__init__()
    fresh = module_from_spec(process.__spec__)
    process.__spec__.loader.exec_module(fresh)
    process._current_process, process._parent_process, process._children = fresh._current_process, None, set()
    process._current_process._config["authkey"] = process.AuthenticationString(os.urandom(32))


def _forget_handlers() -> None:
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _open_streams() -> None:
    sys.stdin = sys.__stdin__ = open(0, closefd=False, encoding="utf-8")  # type: ignore[misc]  # noqa: SIM115
    for name, descriptor, errors in (("stdout", 1, "strict"), ("stderr", 2, "backslashreplace")):
        raw = io.FileIO(descriptor, "w", closefd=False)
        lines = descriptor == 2 or os.isatty(descriptor)
        stream = io.TextIOWrapper(io.BufferedWriter(raw), "utf-8", errors, line_buffering=lines)
        raw.name = f"<{name}>"
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


@cache
def _interpreters_path() -> list[str]:
    """``sys.path`` of a fresh interpreter, without ``PYTHONPATH`` and the program's folder."""
    show = "import json, sys; print(json.dumps(sys.path))"
    done = subprocess.run([sys.executable, "-I", "-c", show], stdout=subprocess.PIPE, check=True)
    return list(json.loads(done.stdout))


def _numbers_of_its_own(environment: Mapping[str, str]) -> None:
    """What a library takes from the system when it is imported."""
    import numpy as np
    import torch

    np.random.seed()
    if threads := environment.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))


def _run(words: list[str], main: ModuleType, *, safe: bool) -> None:
    """The program that ``words`` name, as the module ``main``."""
    if words[0] == "-m":
        sys.path[:0] = [] if safe else [os.getcwd()]
        sys.argv = ["-m", *words[2:]]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif words[0] == "-c":
        sys.path[:0] = [] if safe else [""]
        sys.argv = ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec", dont_inherit=True), vars(main))  # noqa: S102
    else:
        path = os.path.abspath(words[0])
        sys.path[:0] = [] if safe else [os.path.dirname(os.path.realpath(path))]
        sys.argv = list(words)
        vars(main).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))  # noqa: S102


def _end(program: Callable[[], None]) -> NoReturn:
    """Calls ``program`` and ends this process as an interpreter does after it."""
    code = 0
    try:
        program()
    except SystemExit as left:
        code = left.code if isinstance(left.code, int) else int(left.code is not None)
        if left.code is not None and not isinstance(left.code, int):
            print(left.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - whatever ends a program is shown as Python shows it
        error.__traceback__ = _below_this_file(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    finally:
        try:
            threading._shutdown()  # type: ignore[attr-defined]
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        finally:
            os._exit(code & 0xFF)


def _below_this_file(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, runpy.__file__, "<frozen runpy>"):
        trace = trace.tb_next
    return trace
