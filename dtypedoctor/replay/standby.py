"""Processes that stand by: forks of a program from a moment of its run, asleep until somebody wants to see what comes after it.

A standby is not a child of the program (it is forked twice), so the program can wait for its children as before. Nothing that it shares with the
program stays shared (:mod:`dtypedoctor.replay.cage`). It reads requests from an unnamed pipe of its own, whose address is in a file: no folder ever holds
a pipe, which whoever reads or copies the folder would wait at. For each request it forks a process that returns from
:func:`stand_by` with the request, goes on with the program's own code, and must end by ``os._exit``.
"""

import contextlib
import ctypes
import errno
import posix  # what os has, under names that programs do not replace
import signal
import sys
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from random import getstate, setstate
from select import select
from signal import pthread_sigmask
from typing import Any

from dtypedoctor.replay.cage import isolate_descriptors, isolate_memory
from dtypedoctor.unpatched import from_json, getpid, process_time, thread_time, to_json
from dtypedoctor.values import dataclass

__all__ = ["PREFIX", "THREADS", "OrEnd", "Standby", "is_forking", "not_told_of_children", "send", "stand_by"]

PREFIX = "standby-"
"""How the names of the files begin that say where a standby listens; step and outermost call follow."""
READY_SECONDS = 10.0
"""How long the program waits at most until a standby is isolated."""
ORPHAN_SECONDS = 60
"""How long a standby outlives the program."""

THREADS = "threads"
"""Key in a request: whether the process that goes on can use as many OpenMP threads as the program."""

_libc = ctypes.CDLL(None)
_SIZE_OF_SIGACTION = 256
"""Bytes; more than the structure has anywhere. Zeros stand for the default action."""
_forking = False


def is_forking() -> bool:
    """Whether the fork that is being made is a standby, which hooks that listen to forks are to leave alone."""
    return _forking


@dataclass(frozen=True, slots=True, kw_only=True)
class Standby:
    """A process that stands by.

    Attributes:
        address: the file that says where it listens.
        seconds: of processor time that it took to make it, which are the same on a busy machine.
    """

    address: Path
    seconds: float

    def dismiss(self) -> None:
        """Ends it; it removes its file itself, as the program's audit hooks hear what this process removes."""
        with contextlib.suppress(OSError, ValueError):
            send(self.address, None)


def send(address: Path, request: Mapping[str, Any] | None) -> None:
    """Sends a request to the standby whose address is in a file; None ends it.

    Raises:
        OSError: it is gone.
        ValueError: the file holds no address.
    """
    with FileIO(str(address)) as file:
        process, source, inode = map(int, file.readall().split())
    descriptor = posix.open(f"/proc/{process}/fd/{source}", posix.O_WRONLY | posix.O_NONBLOCK | posix.O_CLOEXEC)
    try:
        if posix.fstat(descriptor).st_ino != inode:  # the process is gone, and another has its number
            raise ProcessLookupError(errno.ESRCH, "no such standby")
        posix.write(descriptor, to_json(request).encode("ascii") + b"\n")
    finally:
        posix.close(descriptor)


class OrEnd:
    """Ends this process where an exception would leave the block: it is a fork, and the program's code is not to see it."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            posix._exit(1)


def stand_by(address: Path) -> Standby | dict[str, Any]:
    """Forks this process at this moment.

    Args:
        address: the file that is to say where the standby listens; must not exist yet.

    Returns:
        In the program the standby; in each process that goes on from here later the request that it was made for.

    Raises:
        OSError: it could not be made.
    """
    began = thread_time()
    ready, tell = posix.pipe()
    has_threads = _end_openmp_threads()
    try:
        made = _forked(address, ready, tell)
        if not isinstance(made, float):
            return {**made, THREADS: has_threads}
    finally:
        posix.close(ready)
    return Standby(address=address, seconds=thread_time() - began + made)


_HARD_PAUSE = 2
_SMALLEST_NORMAL = sys.float_info.min
_openmp: dict[int, list[ctypes.CDLL] | None] = {}


def _end_openmp_threads() -> bool:
    """Ends the threads of this thread's OpenMP pools. The next parallel region starts as many again, in this process and in a fork of it.

    GNU's OpenMP believes its threads to be there in a fork, too, and would wait for them for ever.

    Returns:
        Whether a fork that is made now can use OpenMP.
    """
    if _SMALLEST_NORMAL / 2 == 0.0:  # denormals are flushed, which threads inherit from the one that starts them
        return False
    if len(sys.modules) not in _openmp:
        _openmp.clear()
        _openmp[len(sys.modules)] = _openmp_libraries()
    libraries = _openmp[len(sys.modules)]
    return libraries is not None and all(library.omp_pause_resource_all(_HARD_PAUSE) == 0 for library in libraries)


def _openmp_libraries() -> list[ctypes.CDLL] | None:
    """GNU's OpenMP libraries in this process; None where one cannot end its threads, or comes from another vendor."""
    with FileIO("/proc/self/maps") as file:
        words = (line.rpartition(b" ")[2] for line in file.readall().splitlines())
        paths = {word.decode("utf-8", "replace") for word in words if b"omp" in word.rpartition(b"/")[2]}
    found = []
    for path in sorted(paths):
        name = path.rpartition("/")[2]
        if name.startswith(("libiomp", "libomp")):
            return None
        if name.startswith("libgomp"):
            library = ctypes.CDLL(path, mode=posix.RTLD_NOLOAD)
            if not hasattr(library, "omp_pause_resource_all"):
                return None
            found.append(library)
    return found


def _forked(address: Path, ready: int, tell: int) -> dict[str, Any] | float:
    """In the program, once the standby is ready, the seconds of other processes for it; in one that goes on later the request.

    ``tell`` is closed in both.

    Raises:
        OSError: it did not get ready, or there is no memory for it.
    """
    global _forking
    drawn = getstate()  # Python seeds its generator anew in a fork
    program = getpid()
    heard = pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGCHLD})
    _forking = True
    try:
        with not_told_of_children():
            try:
                child = posix.fork()
            except OSError:
                posix.close(tell)
                raise
            if child == 0:
                with OrEnd():
                    _leave_parent()
                    request = _listen(address, tell, program)
                    setstate(drawn)
                return request
            posix.close(tell)
            microseconds = posix.read(ready, 32) if select([ready], [], [], READY_SECONDS)[0] else b""
            if not microseconds:  # a library's own handler of forks may wait for a thread
                posix.kill(child, signal.SIGKILL)
            used = posix.wait4(child, 0)[2]
    finally:
        _forking = False
        if getpid() == program:
            pthread_sigmask(signal.SIG_SETMASK, heard)
    if not microseconds:
        raise OSError(f"{address.name} did not get ready")
    return float(used.ru_utime + used.ru_stime + int(microseconds) / 1e6)


@contextlib.contextmanager
def not_told_of_children() -> Iterator[None]:
    """The program's handler of SIGCHLD, whatever it is, does not run for children that end inside; it does after it for those of its own.

    Blocking the signal instead would only delay it, or let a thread of a library take it.
    """
    handler = ctypes.create_string_buffer(_SIZE_OF_SIGACTION)
    default = ctypes.create_string_buffer(_SIZE_OF_SIGACTION)
    _libc.sigaction(signal.SIGCHLD, default, handler)
    try:
        yield
    finally:
        _libc.sigaction(signal.SIGCHLD, handler, None)
    with contextlib.suppress(ChildProcessError):
        if posix.waitid(posix.P_ALL, 0, posix.WEXITED | posix.WNOHANG | posix.WNOWAIT) is not None:
            posix.kill(getpid(), signal.SIGCHLD)


def _leave_parent() -> None:
    """Goes on in a child of this process, which ends: so the program has no child that it does not know of."""
    if posix.fork():
        posix._exit(0)


def _listen(address: Path, tell: int, program: int) -> dict[str, Any]:
    """Sleeps until requests come; returns in a fork for each of them. Signals are blocked, and stay so."""
    posix.setsid()  # what ends the program's process group, such as a launcher, is not meant for it
    source, writer = posix.pipe()
    isolate_descriptors(keep=(source, writer, tell))  # with a writer of its own the pipe never ends
    isolate_memory()
    _be_killed_first()
    with FileIO(str(address), "xb") as file:
        file.write(b"%d %d %d" % (getpid(), source, posix.fstat(source).st_ino))
    posix.write(tell, str(int(process_time() * 1e6)).encode("ascii"))
    posix.close(tell)
    while (request := _next_request(source, program)) is not None:
        child = posix.fork()
        if child == 0:
            posix.close(source)
            posix.close(writer)
            return request
        posix.waitpid(child, 0)
    with contextlib.suppress(OSError):
        address.unlink()
    posix._exit(0)


def _next_request(source: int, program: int) -> dict[str, Any] | None:
    """What is asked for next; None where nothing will be any more."""
    line = b""
    left = ORPHAN_SECONDS
    while not line.endswith(b"\n"):
        if select([source], [], [], 1.0)[0]:
            line += posix.read(source, 1)
        elif not _is_there(program):
            left -= 1
        if not left:
            return None
    request: dict[str, Any] | None = from_json(line)
    return request


def _is_there(process: int) -> bool:
    try:
        posix.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _be_killed_first() -> None:
    """Where memory runs out, the kernel is to end this process and not the program."""
    with contextlib.suppress(OSError), FileIO("/proc/self/oom_score_adj", "wb") as file:
        file.write(b"1000")
