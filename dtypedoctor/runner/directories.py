"""Run directories: their names, how they come to be, and how they are taken away again.

Only what the doctor has made is taken away: a file that it did not make is somebody's work.
"""

import contextlib
import os
import re
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from dtypedoctor.errors import UsageError
from dtypedoctor.patterns import regex
from dtypedoctor.redaction.redact import PRIVATE_REQUEST
from dtypedoctor.runner.run import EXIT, STDERR, STDOUT
from dtypedoctor.scenario.model import REQUEST
from dtypedoctor.trace.cursor import CURSOR
from dtypedoctor.trace.events import NAMES, Refused
from dtypedoctor.trace.lines import EVENTS
from dtypedoctor.trace.ranks import LEADING, STREAMS

TIMING = "timing.json"
"""How long the parts of a run took, in its directory."""

HIDDEN = ".dtypedoctor-"
"""How the names of directories begin in which a program that is running is recorded; that of the run follows."""

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


def hidden_directory(out: Path | None, name: str) -> tuple[Path, Path | None]:
    """Creates a hidden directory beside the folder of all runs, in which a program is recorded for as long as it runs.

    So it neither meets a folder ``runs`` that it has not made itself, nor takes this run away where it empties its own. :func:`appear` is
    for the moment at which it has ended.

    Args:
        out: where the run is to lie then; ``runs/NAME-TIME`` where that is None.
        name: of the run.

    Returns:
        Where the run is going to lie, which does not exist yet, and the hidden directory; None where there can be none from which it could
        be moved there at once, and then the former exists.

    Raises:
        UsageError: ``out`` exists, or nothing can be created.
    """
    beside = _beside_runs()
    for directory in _unnamed(name) if out is None else [out]:
        if beside is None:
            break
        if directory.exists() and out is None:
            continue
        if not directory.exists() and _made(hidden := beside / f"{HIDDEN}{'-'.join(_below_runs(directory).parts)}"):
            return directory, hidden
    return new_directory(out, name), None


def appear(hidden: Path, directory: Path) -> Path:
    """Moves a run from its hidden directory to ``directory``; where it lies then, which is where it was if that cannot be."""
    try:
        directory.mkdir(parents=True)
        hidden.rename(directory)
    except OSError:  # the program has made a file of this name, or a link to another disk
        with contextlib.suppress(OSError):
            directory.rmdir()
        return hidden if hidden.exists() else directory
    return directory


def _unnamed(name: str) -> Iterator[Path]:
    """``runs/NAME-TIME``, then with numbers behind it."""
    stem = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    return (runs_folder() / (stem + (f"-{i}" if i else "")) for i in count())


def _below_runs(directory: Path) -> Path:
    return directory.relative_to(runs_folder())


def _beside_runs() -> Path | None:
    """The folder in which that of all runs lies, or is going to; None where nothing can be moved from there to it."""
    runs = runs_folder()
    beside = runs if runs.absolute() == Path.cwd() else next(path for path in runs.parents if path.exists())
    is_movable = not runs.exists() or (_is_open(runs) and runs.stat().st_dev == beside.stat().st_dev)
    return beside if is_movable and _is_open(beside) else None


def _is_open(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK)


def runs_folder() -> Path:
    """Where run directories are made that nobody names: ``runs``, unless ``DTYPEDOCTOR_RUNS`` or the project's configuration says another."""
    return Path(os.environ.get("DTYPEDOCTOR_RUNS") or "runs")


def make_directory(directory: Path) -> None:
    """Creates a directory that does not exist yet.

    Raises:
        UsageError: it exists, or cannot be created.
    """
    if not _made(directory):
        raise UsageError(f"{directory}: already exists", "A run is never overwritten; give another --out.")


def _made(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise UsageError(f"{directory}: cannot be created ({error.strerror})", "Give a writable --out.") from error
    return True


def job_directory(name: str) -> Path:
    """``runs/NAME-TIME`` with the time at which the parent process was started: the same for all that it has started."""
    return runs_folder() / f"{name}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(_started(os.getppid())))}"


def _started(process: int) -> float:
    """Seconds since the epoch at which a process was started."""
    ticks = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[_START])
    lines = Path("/proc/stat").read_text().splitlines()
    booted = next(int(line.split()[1]) for line in lines if line.startswith("btime"))
    return booted + ticks / os.sysconf("SC_CLK_TCK")


def scenario_name(program: str) -> str:
    """A scenario's name made from that of a script or module."""
    words = re.sub(r"[^a-z0-9_.-]+", "-", Path(program).name.removesuffix(".py").lower())
    return words.strip("-_.")[:100] or "script"


_OWN = {
    REQUEST, PRIVATE_REQUEST, EVENTS, CURSOR, EXIT, STDOUT, STDERR, "server.log", "bisection.jsonl", "scenarios.jsonl", "sent.json", "random_states.json", STREAMS,
    "failures.json", LEADING, "error.json", "stdout.log", "stderr.log", "folded.json", "folded.json.part", TIMING,
    "nodes.json", "node.json", "look.json",
}  # fmt: skip
_DETAIL = regex(r"detail-[0-9.]+\.jsonl")
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
        with trace.open("rb") as file:
            return _REFUSED not in file.read(_ENOUGH)
    except OSError:  # what cannot be looked into is left alone
        return True


def _ever(trace: Path, begin: bytes) -> bool:
    """Whether a line of a trace begins like this; also where it cannot be read."""
    try:
        with trace.open("rb") as file:
            return any(line.startswith(begin) for line in file)
    except OSError:
        return True


def _remove_own(directory: Path) -> None:
    for folder, folders, files in os.walk(directory, topdown=False):
        with contextlib.suppress(OSError):  # what cannot be removed stays
            for name in _own([*files, *folders]):
                path = Path(folder, name)
                if path.is_symlink() or path.is_file():
                    path.unlink()
        with contextlib.suppress(OSError):  # it is not empty
            Path(folder).rmdir()


def _own(names: list[str]) -> Iterator[str]:
    return (name for name in names if name in _OWN or _DETAIL.fullmatch(name))
