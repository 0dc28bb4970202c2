"""Run directories: their names, how they come to be, and how they are taken away again.

Only what the doctor has made is taken away: a file that it did not make is somebody's work.
"""

import contextlib
import errno
import os
import re
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import open_file, working_directory
from dtypedoctor.guardian import make_private_folder, make_run_directory, move_into
from dtypedoctor.interruptions import say
from dtypedoctor.redaction.redact import PRIVATE_REQUEST, REQUEST
from dtypedoctor.runner.run import EXIT, STDERR, STDOUT
from dtypedoctor.trace.events import NAMES, Refused
from dtypedoctor.trace.lines import CURSOR, EVENTS
from dtypedoctor.trace.ranks import BEGUN, FAILURES, LEADING, REFUSED, REPEATS, STATES

_START = 19
"""Place of the time of start in ``/proc/PID/stat``, counted from behind the name."""


def new_directory(out: Path | None, name: str) -> Path:
    """Creates ``out`` or, where that is None, ``runs/NAME-TIME`` with a number behind it while that is taken.

    Two that are started in the same second get two directories: creating one is also what says that it was free.

    Raises:
        UsageError: ``out`` exists, or none can be created.
    """
    if out is not None:
        make_directory(out)
        return out
    return next(path for path in _unnamed(name) if _made(path))


class RecordFolder:
    """A private folder in which a program is recorded while it runs, and from which the record then moves to where it was asked for.

    So a program that reads, copies, archives or empties its own folder finds nothing of ours there, and no folder ``runs`` that it has not made.

    Args:
        private: the folder, which exists.
        directory: where the record is going to lie; the same where it is not to be moved.
        merge: take a directory that is there already if it holds nothing of that name: the program may have made the one that was asked for.

    Attributes:
        private, directory, merge: see above; ``directory`` is where the record lies in the end.
    """

    def __init__(self, private: Path, directory: Path, *, merge: bool = False) -> None:
        self.private = private
        self.directory = directory
        self.merge = merge
        self._start = working_directory()
        self._is_reserved = private == directory

    def reserve(self) -> None:
        """Creates the directory in which the record is going to lie, under another name where that is taken by now.

        Where that cannot be, the record stays where it is.
        """
        if self._is_reserved:
            return
        self._is_reserved = True
        try:
            names = [path.name for path in self.private.iterdir()]
            made = make_run_directory(str(self._absolute), names, merge=self.merge)
            self.directory = self.directory.with_name(os.path.basename(made))
        except OSError as error:  # a file has its name, or the disk is full
            self._stay(error)

    def arrive(self) -> None:
        """Moves the record to its directory, or says why it stays where it is."""
        if not self.private.is_dir():
            return
        self.reserve()
        if self.directory == self.private:
            return
        try:
            move_into(str(self.private), str(self._absolute))
        except OSError as error:
            self._stay(error)
        else:
            if working_directory() != self._start:  # a program that is watched from inside has changed it
                self.directory = self._absolute

    @property
    def _absolute(self) -> Path:
        """The directory as it was meant when the run began."""
        return (self._start or Path()) / self.directory

    def _stay(self, error: OSError) -> None:
        say(f"dtypedoctor: {self.directory}: cannot be written ({error.strerror}); the run stays in {self.private}")
        self.directory = self.private


def new_record(out: Path | None, name: str, script: Path | None = None) -> RecordFolder:
    """Makes a private folder for a run.

    Args:
        out: where the run is to lie in the end; ``runs/NAME-TIME`` where that is None.
        name: of the run.
        script: the folder of the program's script, if it has one.

    Raises:
        UsageError: ``out`` exists, or nothing can be created.
    """
    directory = out if out is not None else next(path for path in _unnamed(name) if not os.path.lexists(path))
    if os.path.lexists(directory):
        raise _exists(directory)
    above = next(path for path in directory.parents if path.exists())
    if not (above.is_dir() and os.access(above, os.W_OK | os.X_OK)):
        number = errno.EACCES if above.is_dir() else errno.ENOTDIR
        raise _not_created(directory, OSError(number, os.strerror(number)))
    here = working_directory()
    program = [str(path) for path in (here, script) if path is not None]
    try:
        private = Path(make_private_folder(name, program, str((here or Path()) / above)))
    except OSError as error:
        raise _not_created(directory, error) from error
    return RecordFolder(private, directory, merge=out is not None)


def _unnamed(name: str) -> Iterator[Path]:
    """``runs/NAME-TIME``, then with numbers behind it."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return (runs_folder() / (stem + (f"-{i}" if i else "")) for i in count())


def runs_folder() -> Path:
    """Where run directories are made that nobody names: ``runs``, unless ``DTYPEDOCTOR_RUNS`` or the project's configuration says another."""
    return Path(os.environ.get("DTYPEDOCTOR_RUNS") or "runs")


def make_directory(directory: Path) -> None:
    """Creates a directory that does not exist yet.

    Raises:
        UsageError: it exists, or cannot be created.
    """
    if not _made(directory):
        raise _exists(directory)


def _made(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise _not_created(directory, error) from error
    return True


def _exists(directory: Path) -> UsageError:
    return UsageError(f"{directory}: already exists", "A run is never overwritten; give another --out.")


def _not_created(directory: Path, error: OSError) -> UsageError:
    return UsageError(f"{directory}: cannot be created ({error.strerror})", "Give a writable --out.")


def job_directory(name: str) -> Path:
    """``runs/NAME-TIME`` with the time at which the parent process was started: the same for all that it has started."""
    ticks = int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[_START])
    booted = next(
        int(line.split()[1]) for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime")
    )
    started = time.localtime(booted + ticks / os.sysconf("SC_CLK_TCK"))
    return runs_folder() / f"{name}-{time.strftime('%Y%m%d-%H%M%S', started)}"


_OWN = {
    REQUEST, PRIVATE_REQUEST, EVENTS, CURSOR, EXIT, STDOUT, STDERR, "server.log", "bisection.jsonl", "scenarios.jsonl", "sent.json", STATES, BEGUN, REPEATS, REFUSED,
    FAILURES, LEADING, "error.json", "stdout.log", "stderr.log", "folded.json", "folded.json.part",
    "nodes.json", "node.json", "look.json",
}  # fmt: skip
_DETAIL = re.compile(r"detail-[0-9.]+\.jsonl|random_states-\w+\.json")
_REFUSED = f'"e":"{NAMES[Refused]}"'.encode()
_SAMPLES = b'["s",'
_ENOUGH = 1 << 16
"""Bytes of a trace in which a refusal stands, if it holds one: nothing was run before it."""


def remove_unused(directory: Path) -> None:
    """Takes a run directory away in which nothing was run.

    One that holds a run, however that ended, stays as it is; so does every file that the doctor did not make, and the
    folders that lead to it.
    """
    if not any(_is_run(trace) for trace in directory.rglob(EVENTS)):
        _remove_own(directory)


def remove_unmeasured(directory: Path) -> bool:
    """Takes a run directory away in which nothing was measured, but for files that the doctor did not make; whether it is gone."""
    if not any(_ever(trace, _SAMPLES) for trace in directory.rglob(EVENTS)):
        _remove_own(directory)
    return not directory.exists()


def clear(place: Path) -> None:
    """Makes room for a run where an interrupted one lies: the doctor's own files go, what else is there is set aside.

    It is then in the directory of the same name with ``.kept-1`` (or another number) behind it.
    """
    if place.is_symlink() or not place.is_dir():
        return
    _remove_own(place)
    if place.exists():
        aside = (place.with_name(f"{place.name}.kept-{number}") for number in count(1))
        place.rename(next(path for path in aside if not path.exists()))


def _is_run(trace: Path) -> bool:
    try:
        with open_file(trace) as file:
            return _REFUSED not in file.read(_ENOUGH)
    except OSError:  # what cannot be looked into is left alone
        return True


def _ever(trace: Path, begin: bytes) -> bool:
    """Whether a line of a trace begins like this; also where it cannot be read."""
    try:
        with open_file(trace) as file:
            return any(line.startswith(begin) for line in file)
    except OSError:
        return True


def _remove_own(directory: Path) -> None:
    for folder, folders, files in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):  # what cannot be removed stays
            for path in (Path(folder, name) for name in (*files, *folders) if name in _OWN or _DETAIL.fullmatch(name)):
                if path.is_symlink() or path.is_file():
                    path.unlink()
        with contextlib.suppress(OSError):  # it is not empty
            Path(folder).rmdir()


@contextlib.contextmanager
def removed_if_refused(directory: Path, shown: Path | None = None) -> Iterator[None]:
    """Takes the run directory, which the user knows as ``shown``, away again where nothing could be run in it, or nothing was measured before
    Ctrl-C.
    """
    try:
        yield
    except UsageError:
        remove_unused(directory)
        raise
    except KeyboardInterrupt as error:
        if remove_unmeasured(directory):
            raise KeyboardInterrupt(
                f"interrupted before anything was measured; {shown or directory} was removed"
            ) from error
        raise
