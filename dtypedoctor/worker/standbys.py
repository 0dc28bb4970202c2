"""Keeps processes that stand by while a script runs, so that what failed in it can be replayed from shortly before, without starting it again."""

import os
import posix
import sys
from _thread import start_new_thread
from collections.abc import Iterator, Sequence
from io import FileIO
from math import inf
from mmap import PAGESIZE as PAGE
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import is_available, is_initialized
from torch.optim import Optimizer

from dtypedoctor._torch_private import COMPILER, compute_alone
from dtypedoctor.instrument.alone import is_sharded
from dtypedoctor.instrument.capsule import CapsuleWatch, Kind, Wanted
from dtypedoctor.instrument.contents import tensors_given
from dtypedoctor.instrument.in_place import CAPSULE_LIMIT
from dtypedoctor.instrument.module_tree import modules_in
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.optrace import OpWindow
from dtypedoctor.instrument.places import Rows, Source
from dtypedoctor.instrument.statistics import Named, digest_of, holds_whole_numbers
from dtypedoctor.interruptions import is_interruption
from dtypedoctor.redaction.messages import message_of
from dtypedoctor.replay.cage import forbid_changes, is_supported, limit_processor_time
from dtypedoctor.replay.capsule import CAPSULE, CAPSULE_TENSORS
from dtypedoctor.replay.standby import PREFIX, THREADS, OrEnd, Standby, stand_by
from dtypedoctor.trace.events import REPLAY_OF_FAILURES
from dtypedoctor.trace.lines import EVENTS
from dtypedoctor.trace.ranks import member
from dtypedoctor.trace.records.execution import FailingBits, ReplayNote
from dtypedoctor.unpatched import from_json, getpid, perf_counter, process_time, read_text, sleep, to_json
from dtypedoctor.worker.environment import resident

if TYPE_CHECKING:
    from dtypedoctor.worker.process_watch import ProcessWatch
    from dtypedoctor.worker.recording import Recording

FREE_SECONDS, FREE_SECONDS_OF_A_RANK = 0.25, 1.0
SHARE = 0.02
"""Time that may go into standbys: so much at once, and a share of the time since the watch began.

A rank of a job starts slowly anyway, and its replay cannot go beyond an optimizer step: each step wants a standby.
"""
SECONDS_PER_PAGE = 1e-6
"""What it costs to write for the first time to a page of memory that a standby has too."""
GOES_ON = 5.0
"""Seconds, at least, that a replay goes on after the last of its windows; else as long as it took until then."""
IDLE_SECONDS, LOOK_SECONDS, IDLE_SHARE = 5.0, 0.5, 0.01
"""A replay that uses less than this share of a processor for so long waits for something; how often that is looked at."""
MAX_KEPT = 2
"""Standbys that stay because something went wrong after they were made."""
BYTES_TO_COMPARE = 256 << 20
"""Bytes of failing tensors of which a digest is taken in a run: a quarter of a second."""
BYTES_PER_RECORD = 1 << 20
"""Each digest counts as this many bytes more, so that there are at most 256."""
IN_PLACE = "DTYPEDOCTOR_REPLAY_IN_PLACE"
"""Environment variable that has calls replayed in the process also on a CPU: ``fails``, ``late`` for what is known late only, as on a device, or a
number for each so-manieth call. For tests."""
MOST_READ = 256 << 10
"""Bytes of a trace that are read again at the end of the program, a few milliseconds."""
_PLAIN = frozenset({
    "header", "stage", "root", "parameter", "site", "flow", "metric", "environment", "coverage", "resources", "not-watched", "end",
})  # fmt: skip
"""Records as they are named on disk from which no window follows, nor a capsule."""
ROOM = 2
"""How often the memory of the process must be free as well: what it writes from then on is there twice."""


class Standbys:
    """Forks a standby before the first outermost call and, as far as the time goes, before later ones.

    The first stays, and so does the last before something was not finite or raised; of the others the latest.

    Args:
        directory: for the files that say where they listen.
        recording: of this process.
        watch: the watch of this process.
        capsule_limit: bytes that the capsule of a call may take that is replayed in this process itself.
    """

    def __init__(
        self, directory: Path, recording: "Recording", watch: "ProcessWatch", capsule_limit: int = CAPSULE_LIMIT
    ) -> None:
        self._capsule_limit = capsule_limit
        self._directory = directory
        self._recording = recording
        self._watch = watch
        self._owner = getpid()
        self._latest: Standby | None = None
        self._standing: list[Standby] = []
        self._keeps_latest = False
        self._kept = 0
        self._began = perf_counter()
        self._spent = 0.0
        self._cost = 0.0
        self._impossible = False
        self._in_place = os.environ.get(IN_PLACE, "")
        self._windows: list[OpWindow] = []
        self._over = inf
        self._bytes_to_compare = BYTES_TO_COMPARE
        self._gradients_are_own = False
        self._free_seconds = FREE_SECONDS if member() is None else FREE_SECONDS_OF_A_RANK

    def begin(self) -> None:
        """Begins to make them."""
        instruments = self._watch.instruments
        instruments.keep_operators(self._capsule_limit)
        instruments.modules.before_root.insert(0, instruments.guard.shield(self._before_call, REPLAY_OF_FAILURES))
        instruments.on_suspicion.append(self._keep_latest)
        instruments.modules.on_error.append(self._keep_latest)
        instruments.modules.on_error.append(self._note_inputs)
        instruments.modules.hear_nonfinite(
            instruments.guard.shield(self._note_nonfinite, "a comparison with the replay")
        )

    def _before_call(self, module: nn.Module) -> None:
        position = self._watch.instruments.position
        if self._windows:
            self._end_in_time()
            self._compute_alone(module)
        if not self._windows and self._is_replayed_in_place(module):
            self._replay_in_place()
            return
        now = perf_counter() - self._began
        if position.backward_depth or getpid() != self._owner or self._impossible:
            return
        if self._spent and self._spent + self._cost > self._free_seconds + SHARE * now:
            return
        why_not = next(_hindrances(), "")
        if why_not:
            self._give_up(why_not)
            return
        try:
            made = stand_by(self._directory / f"{PREFIX}{position.step}-{position.call}")
        except OSError as error:
            if is_interruption(error):
                raise
            self._give_up(f"the process cannot be forked ({error.strerror or error})")
            return
        if isinstance(made, Standby):
            self._keep(made)
        else:
            with OrEnd():
                self._go_on(made, module)
                self._compute_alone(module)

    def _is_replayed_in_place(self, module: nn.Module) -> bool:
        """Whether no fork of this process can go on: CUDA does not work in one, and a unit of FSDP2 waits for the other ranks."""
        return bool(torch.cuda.is_initialized() or self._in_place or is_sharded(module))

    def _replay_in_place(self) -> None:
        """No fork of this process can go on: what fails is made again in the process itself."""
        replays = self._watch.instruments.in_place
        if not replays.begun and getpid() == self._owner:
            force = int(self._in_place) if self._in_place.isdecimal() else 0
            replays.begin(force=force, late=self._in_place == "late", capsule_limit=self._capsule_limit)

    def _give_up(self, why: str) -> None:
        self._impossible = True
        self._watch.instruments.guard.tell(REPLAY_OF_FAILURES, why)

    def _keep(self, made: Standby) -> None:
        self._recording.standby_is_there()
        if self._latest is not None and not self._keeps_latest:
            self._standing.remove(self._latest)
            self._latest.dismiss()
        self._keeps_latest = self._latest is None  # the first one
        self._latest = made
        self._standing.append(made)
        self._cost = made.seconds + resident() / PAGE * SECONDS_PER_PAGE
        self._spent += self._cost

    def dismiss_unneeded(self) -> None:
        """Ends those that stand by, if the trace, which is complete, holds nothing that a replay could explain.

        The program shares its memory with them: each page that it writes to while it is taken apart at its end is copied.
        """
        if getpid() == self._owner and member() is None and _is_uneventful(self._directory / EVENTS):
            while self._standing:
                self._standing.pop().dismiss()

    def _keep_latest(self, *_: Any) -> None:
        """Something has gone wrong since the latest one was made."""
        if not self._keeps_latest and self._kept < MAX_KEPT:
            self._kept += 1
            self._keeps_latest = True

    def _note_inputs(self, module: nn.Module, args: tuple[Any, ...], _: BaseException) -> None:
        """The call of ``module`` has raised: a replay is compared by what it was called with, whole numbers where that is all."""
        place = self._watch.instruments.names.find(module)
        held = tensors_given(args, {}) or [(str(i), one) for i, one in enumerate(args) if holds_whole_numbers(one)]
        inputs = [(f"input.{path}", tensor) for path, tensor in held]
        self._note_bits(place[1] if place is not None else None, None, inputs)

    def _note_nonfinite(self, rows: Rows, at: tuple[int, int], source: Source | None, given: Sequence[Named]) -> None:
        """Tensors are not finite; what went into the module that has returned them, too, where one has."""
        modules = self._watch.instruments.modules
        if source is None:
            for (
                site,
                tensor,
            ) in rows:  # each by its place: a run that leaves modules out by turns has others than its replay
                kind, fqn = modules.kind_and_fqn(site)
                # The replay has measured such a parameter right after the step.
                is_late = kind == "param" and modules.phase_of(site) != "optimizer"
                self._note_bits(fqn, None, [("written param" if is_late else kind, tensor)], at)
            return
        found = [(f"output.{number}", tensor) for number, (_, tensor) in enumerate(rows)]
        found += [(f"input.{path}", tensor) for path, tensor in given]
        self._note_bits(source.place.fqn, source.phase, found, at)

    def _note_bits(
        self, fqn: str | None, phase: str | None, found: Sequence[Named], at: tuple[int, int] | None = None
    ) -> None:
        """Writes what a replay is compared with by; a program that works with infinities in every call is not to wait for it.

        ``at`` is the step and the call of the tensors where they are not those of the moment: parameters may be looked at later.
        """
        session = self._watch.instruments.session
        with session.position.mute():
            now = at is None or at == (session.position.step, session.position.call)
            random = digest_of(torch.default_generator.get_state()) if now else ""
            for name, tensor in found:
                if tensor.device.type != "cpu" or tensor.nbytes > self._bytes_to_compare:
                    continue
                self._bytes_to_compare -= tensor.nbytes + BYTES_PER_RECORD
                record = FailingBits(
                    name=name,
                    dtype=dtype_name(tensor),
                    shape=list(tensor.shape),
                    digest=digest_of(tensor),
                    random=random,
                )
                session.emit(record, fqn=fqn, phase=phase, at=at)

    def _go_on(self, request: dict[str, Any], module: nn.Module) -> None:
        directory = Path(request["directory"])
        wanted = request.get("capsule")
        files = CapsuleFiles(directory) if wanted else None
        with FileIO(request["done"], "wb") as done:  # stays open until this process ends
            posix.dup(done.fileno())
            done.write(str(getpid()).encode("ascii"))
        limit_processor_time(request["seconds"])
        self._recording.writer.continue_in(directory, Path(request["recorded"]))
        forbid_changes()
        self._owner = 0
        self._recording.go_on(lambda error: self._is_expected(error, request["raised"]))
        self._began = perf_counter()
        self._windows = [OpWindow(**window) for window in request["windows"]]
        if COMPILER in sys.modules and not any(window.eager for window in self._windows):
            torch.compiler.set_stance(
                "eager_on_recompile"
            )  # no program can be started, and waiting workers are not here
        self._watch.adopt(self._windows)
        if not request[THREADS]:
            threads = torch.get_num_threads()
            torch.set_num_threads(1)  # those of the pool are not in this process, and cannot be started again
            if threads > 1:
                self._tell(f"it computes on 1 thread instead of {threads}")
        if wanted and files is not None:
            from dtypedoctor.worker.call_fixes import tried_fixes  # the corrections, which a healthy run never needs

            kind = Kind(wanted["kind"])
            CapsuleWatch(self._watch.instruments, Wanted(**{**wanted, "kind": kind}), files.write, tried_fixes).begin(
                module
            )
        if is_available() and is_initialized():
            instruments = self._watch.instruments
            instruments.collectives.end_at_first(lambda name: self._end_early(f"{name} needs the other ranks"))
            instruments.phases.before_step.insert(0, self._end_at_step)
        start_new_thread(self._end_when_idle, ())

    def _compute_alone(self, module: nn.Module) -> None:
        """The other ranks are not there in a replay: gradients are not reduced, nor buffers broadcast."""
        for wrapper in modules_in(module) if is_available() and is_initialized() else ():
            if isinstance(wrapper, nn.parallel.DistributedDataParallel):
                self._gradients_are_own |= compute_alone(wrapper)

    def _end_at_step(self, _: Optimizer) -> None:
        if self._gradients_are_own:
            self._end_early("the optimizer step needs the gradients of the other ranks")

    def _end_early(self, why: str) -> None:
        self._tell(why, ended=True)
        posix._exit(0)

    def _is_expected(self, error: BaseException, raised: list[Any]) -> bool:
        """Whether the program itself has ended with ``error``; ``raised`` is its type and the call, where it has raised."""
        if [type(error).__name__, self._watch.instruments.position.call] == raised:
            return True
        self._tell(f"it raised {type(error).__name__}: {message_of(error)}", ended=True)
        return False

    def _end_when_idle(self) -> None:
        """Ends a replay that waits for what is not there, such as a thread; runs in a thread of its own.

        One that waits for a processor goes on: on a busy machine it may get none for seconds.
        """
        idle, used = 0.0, busy_time()
        while idle < IDLE_SECONDS:
            sleep(LOOK_SECONDS)
            before, used = used, busy_time()
            idle = idle + LOOK_SECONDS if used - before < IDLE_SHARE * LOOK_SECONDS else 0.0
        self._end_early("it waited for a thread or a process that is not there in a replay")

    def _tell(self, why: str, *, ended: bool = False) -> None:
        self._watch.instruments.session.emit(ReplayNote(why=why, ended=ended))

    def _end_in_time(self) -> None:
        """Ends a replay that has come far beyond its windows: a training may go on for days."""
        position = self._watch.instruments.position
        if all(position.call > window.call and position.step > window.step for window in self._windows):
            now = perf_counter()
            self._over = min(self._over, now + max(GOES_ON, now - self._began))
            if now > self._over:
                posix._exit(0)


def busy_time() -> float:
    """Seconds of processor time of this process, and those in which its first thread was ready to run and had no processor."""
    try:
        waited = int(read_text("/proc/self/schedstat").split()[1])
    except (OSError, IndexError, ValueError):  # a kernel that does not count them
        waited = 0
    return process_time() + waited / 1e9


class CapsuleFiles:
    """The files of a capsule, opened while that is allowed.

    Args:
        directory: exists; holds none yet.
    """

    def __init__(self, directory: Path) -> None:
        self._description = FileIO(str(directory / CAPSULE), "xb")
        self._tensors = FileIO(str(directory / CAPSULE_TENSORS), "xb")

    def write(self, description: dict[str, Any], tensors: bytes) -> None:
        """Writes both; the description last, so that one that is there is complete."""
        for file, data in ((self._tensors, tensors), (self._description, to_json(description).encode("utf-8"))):
            left = memoryview(data)
            while left:
                left = left[file.write(left) :]


def _is_uneventful(events: Path) -> bool:
    """Whether a trace that is not long has plain records only, and all that was measured is finite."""
    if posix.stat(events).st_size > MOST_READ:
        return False
    return all(map(_is_plain, map(from_json, read_text(events).splitlines())))


def _is_plain(record: Any) -> bool:
    if isinstance(record, list):  # samples; one that is not finite counts its bad elements
        return all(len(row) == 2 for row in record[4])
    return record["e"] in _PLAIN and not record.get("quant") and not record.get("nonfinite")


def _hindrances() -> Iterator[str]:
    """Why no standby can be made now."""
    if not is_supported():
        yield "a process can only be isolated on Linux on x86-64"
    if _available() < ROOM * resident() * _processes_here():
        yield "there is not enough memory for a copy of the process"


def _processes_here() -> int:
    """Processes of this job on this machine, which may all fork at the same time."""
    number = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(number) if member() is not None and number.isdecimal() else 1


def _available() -> int:
    """Bytes of memory that are free, on the machine and in the control group of this process."""
    lines = dict(line.split(":", 1) for line in read_text("/proc/meminfo").splitlines())
    free = int(lines["MemAvailable"].split()[0]) << 10
    return min(free, *_left_in_groups())


def _left_in_groups() -> Iterator[int]:
    group = Path("/sys/fs/cgroup")
    yield 1 << 62
    try:
        limit, used = read_text(group / "memory.max").strip(), read_text(group / "memory.current").strip()
    except OSError:
        return
    if limit != "max":
        yield int(limit) - int(used)
