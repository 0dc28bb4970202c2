"""``exec`` of a launcher on one of several machines, which all name one folder: one report there tells of the ranks of all."""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtypedoctor.errors import DoctorError, UsageError
from dtypedoctor.foreign_files import open_file, parse_json, read_file, write_file
from dtypedoctor.interruptions import say
from dtypedoctor.runner.directories import make_directory
from dtypedoctor.trace.ranks import LAUNCHERS, NODE, node_directories

if TYPE_CHECKING:
    from dtypedoctor.report.model import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """What a launcher's options say of several machines.

    Attributes:
        most: how many there are; with ``--nnodes MIN:MAX`` at most.
        number: of this one, where the options say it.
        meeting: what is the same on all of them: the id of the rendezvous, and the port of its endpoint.
    """

    most: int
    number: int | None
    meeting: str


_COUNT, _NUMBER = ("nnodes", "num_machines", "num_nodes"), ("node_rank", "machine_rank")
_ENDPOINT = ("rdzv_endpoint", "master_port", "main_process_port")
"""Options of torchrun, accelerate and deepspeed that mean the same."""


def nodes_of(command: Sequence[str], environment: Mapping[str, str] = os.environ) -> Nodes | None:
    """The machines that the options of a launcher's command, or torchrun's variables in their place, name; None where it is one, or no launcher."""
    if LAUNCHERS.isdisjoint({os.path.basename(word) for word in command[:3]}):
        return None
    script = next((at for at, word in enumerate(command) if word.endswith(".py")), len(command))
    variables = {
        name.removeprefix("PET_").lower(): value
        for name, value in environment.items()
        if value and name.startswith("PET_")
    }
    options = variables | dict(_options(command[:script]))

    def value(names: Sequence[str]) -> str:
        return next((options[name].rpartition(":")[2] for name in names if name in options), "")

    most, number = value(_COUNT), value(_NUMBER)
    if not most.isdecimal() or int(most) < 2:
        return None
    meeting = (
        f"{value(['rdzv_id'])}:{value(_ENDPOINT)}"  # without the host, which each machine may call by another name
    )
    return Nodes(most=int(most), number=int(number) if number.isdecimal() else None, meeting=meeting)


def _options(launcher: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The options of a launcher, with underscores in their names, and the value of each, if it has one."""
    for word, following in zip(launcher, [*launcher[1:], ""], strict=True):
        option, equals, behind = word.partition("=")
        if option.startswith("-"):
            yield option.lstrip("-").replace("-", "_"), behind if equals else following


def treated_together(
    folder: Path, nodes: Nodes, program: Sequence[str], treat: "Callable[[Path], tuple[Report, int]]"
) -> "tuple[Report, int]":
    """Treats a job in this machine's own directory of ``folder``, and writes the report on all that is there by then into ``folder``.

    Args:
        folder: the same on all machines, if they have it in common.
        nodes: what the launcher's options say of the machines.
        program: the script and its arguments.
        treat: what is done in a new directory; the report on this machine's ranks and the script's exit status.

    Raises:
        UsageError: the folder cannot be used; or what ``treat`` raises.
    """
    job = {"nodes": nodes.most, "meeting": nodes.meeting, "program": list(program)}
    own = enter(folder, job, nodes.number)
    with ExitStack() as refused:
        refused.callback(leave, folder)
        report, status = treat(own)
        refused.pop_all()
    try:
        wait_for_others(folder)
    except KeyboardInterrupt:
        say("dtypedoctor: not waiting for the other machines")
    try:
        return _on_all(folder), status
    except DoctorError as error:
        say(f"dtypedoctor: this report tells of the ranks of this machine only: {error.message}")
        return report, status


def _on_all(folder: Path) -> "Report":
    """The report on the ranks of all machines that have recorded in the folder up to now."""
    from dtypedoctor.cli.reported import as_typed_here, kept
    from dtypedoctor.report.files import report_of_machines

    with alone(folder):
        report = report_of_machines([folder], own_files=True)
        return kept(folder, replace(report, next_command=as_typed_here(report.next_command)))


JOB = "nodes.json"
"""What the job is, in its folder."""
PROCESS = "node.json"
"""Which process records a node, in the node's directory."""
SECONDS = 15.0
"""How long a machine waits for the reports of the others: healthy ranks end within a second of each other."""


def enter(folder: Path, job: dict[str, Any], number: int | None) -> Path:
    """Makes this machine's directory in the folder of a job.

    Args:
        folder: of the job; made by the first machine that comes.
        job: what has to be the same on all machines; ``nodes`` is how many there may be.
        number: of this machine; None for the first that is free.

    Raises:
        UsageError: the folder holds something else, or this machine's directory, or the job has ended, or a folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if all(path.name.startswith(f".{JOB}.") for path in folder.iterdir()):  # what others are about to name so
            _write_once(folder / JOB, job)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be created ({error.strerror})", "Give a writable --out.") from error
    other = "A run is never overwritten; give another --out, the same one on each machine of the job."
    if _json(folder / JOB) != job:
        raise UsageError(f"{folder}: already exists, and is not of this job", other)
    nodes = node_directories(folder)
    ended = [place.name for place in nodes if is_over(place)]
    if ended:
        raise UsageError(f"{folder}: this job has ended already ({', '.join(ended)})", other)
    if number is None and len(nodes) >= job["nodes"]:
        raise UsageError(f"{folder}: all {job['nodes']} machines of this job record here already", other)
    place = _made(folder, number)
    _write_once(place / PROCESS, {"boot": _boot(), "pid": os.getpid()})
    return place


def _made(folder: Path, number: int | None) -> Path:
    if number is not None:
        place = folder / f"{NODE}{number}"
        make_directory(place)
        return place
    for free in count():
        with contextlib.suppress(FileExistsError):
            place = folder / f"{NODE}{free}"
            place.mkdir()
            return place
    raise AssertionError  # count() has no end


def leave(folder: Path) -> None:
    """Takes the folder of a job away again where no machine records in it."""
    with contextlib.suppress(OSError):
        if not node_directories(folder):
            (folder / JOB).unlink()
            folder.rmdir()


def is_over(node: Path) -> bool:
    """Whether a machine has written its report."""
    return (node / "report.json").exists()


def wait_for_others(folder: Path, sleep: Callable[[float], None] = time.sleep) -> None:
    """Returns when every machine that records in the folder has written its report, or was killed here, or after :data:`SECONDS`."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline and not all(is_over(node) or _is_dead(node) for node in node_directories(folder)):
        sleep(0.1)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Inside, no other machine is inside; where the file system has no locks, all may be."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open_file(folder / JOB))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _is_dead(node: Path) -> bool:
    """Whether the process that recorded a node was one of this machine and is gone."""
    told = _json(node / PROCESS)
    return told.get("boot") == _boot() and not Path("/proc", str(told.get("pid"))).exists()


def _boot() -> str:
    """Identifies this machine until it starts again, and nobody."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _write_once(path: Path, content: dict[str, Any]) -> None:
    """Writes a file as a whole, unless it is there already."""
    with contextlib.suppress(FileExistsError):
        write_file(path, json.dumps(content), replace=False)


def _json(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(read_file(path))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
