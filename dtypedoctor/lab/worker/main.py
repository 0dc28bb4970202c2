"""A worker: one process, one scenario, one trace. torchrun starts a rank of a scenario as ``python -m dtypedoctor.lab.worker.main DIRECTORY``."""

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import append_file
from dtypedoctor.instrument.budget import budget_of
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.interruptions import contained
from dtypedoctor.lab.corrections.interventions import Conditions, StageCorrections, record_left_out
from dtypedoctor.lab.models.build import set_seed
from dtypedoctor.lab.scenarios.model import Autocast, Plugin, Request, Scenario, ScenarioStep, is_limited
from dtypedoctor.lab.worker.stage import capturing, compiling, parallel, streaming, take_device, will_be_sharded
from dtypedoctor.lab.worker.stock import Stock
from dtypedoctor.lab.workloads.context import Context, Holder
from dtypedoctor.plugins import BUILTIN, Workload, known, registered, resolve
from dtypedoctor.redaction.redact import read_request
from dtypedoctor.replay.capsule import MODEL, UNLIMITED, Capsule, read_capsule
from dtypedoctor.trace.events import Environment, Stage
from dtypedoctor.trace.ranks import member_of_torchrun, rank_directory
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.worker.capsule_call import is_out_of_memory
from dtypedoctor.worker.environment import MemoryMeter, checksum, describe_environment
from dtypedoctor.worker.recording import Recording, Totals

_LATE_SECONDS, _LATE_TIMES = 15.0, 5.0
"""How long the other ranks may take for a forward pass that this one has left by an exception: so many seconds, and so often as long as it took here."""


def serve(directory: Path, stock: Stock | None = None) -> int:
    """Does what ``DIRECTORY/request.json`` asks for and leaves the trace beside it.

    Args:
        directory: where the request lies.
        stock: models that are built already.

    Returns:
        0 if the scenario ran to its end, 1 if an exception ended it, 2 if the scenario cannot be run at all.
    """
    request = Request.from_text(read_request(directory))
    recording = Recording(directory, watched=request.watch)
    run = _Run(request, recording.writer, directory, stock or Stock())
    recording.watch = run
    ended_by: BaseException | None = None
    try:
        run.all_stages()
    except UsageError as error:
        run.abandon()
        recording.refuse(error.message, error.hint)
        return 2
    except BaseException as error:  # noqa: BLE001  (whatever ends the scenario is its result, also SystemExit)
        ended_by = error
        if is_limited(request.scenario.steps[0].model) and is_out_of_memory(error):  # it says nothing of its dtypes
            run.abandon()
            recording.refuse("the call of the capsule needs more memory than a replay may take", UNLIMITED)
            return 2
    recording.end(ended_by)
    return 0 if ended_by is None else 1


def serve_each(home: Path, channel: Connection, redirect: Callable[[Path], None]) -> None:
    """Builds the model that ``HOME/request.json`` names, then makes a run for each directory that comes through ``channel``.

    After each run sends its status, then, once the model is what it was, an empty text. Where it cannot be made so, the text says why, and this
    ends. It also ends when the other side closes the channel.

    Args:
        home: where what is printed between runs goes.
        channel: to the doctor.
        redirect: has this process write its standard streams into files of a directory.
    """
    scenario = Request.from_text(read_request(home)).scenario
    stock = Stock()
    with contained() as refused:
        device = choose_device(scenario.device)
        prepare_process(scenario, device)
        stock.fill(scenario, device)
    if refused.error is not None:  # each run meets the reason again and reports it
        print(f"not built in advance: {type(refused.error).__name__}: {refused.error}", file=sys.stderr, flush=True)
    with suppress(EOFError, ConnectionError):
        while True:
            directory = Path(channel.recv())
            redirect(directory)
            status = serve(directory, stock)
            sys.stdout.flush()
            sys.stderr.flush()
            redirect(home)
            channel.send(status)
            with contained() as failed:  # a device that no longer answers, for example
                stock.put_back()
            why = "" if failed.error is None else f"{type(failed.error).__name__}: {failed.error}"
            channel.send(why)
            if why:
                return


def leave(status: int) -> NoReturn:
    """Ends this process, the first of its group, and what it has started: a daemon of ``multiprocessing`` is ended by exit handlers.

    These are not run: the trace is complete, and they can only hang or fail.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
    os._exit(status)


class _Run:
    """The scenario's stages in one process."""

    def __init__(self, request: Request, writer: TraceWriter, directory: Path, stock: Stock) -> None:
        self._scenario = request.scenario
        self._capture = request.capture
        self._look = request.look
        self._stock = stock
        self._writer = writer
        self._instruments = Instruments(
            writer,
            watch=request.watch,
            every=request.scenario.watch_every,
            budget=budget_of(request.scenario.overhead_budget),
            look=request.look,
        )
        if request.replay:
            self._instruments.replay_failures(request.capsule_limit)
        self._conditions = Conditions(writer, request.scenario.conditions)
        self._corrections = StageCorrections(writer, request.scenario.corrections)
        self._directory = directory
        self._holder = Holder()
        self._steps = 0
        self._meter: MemoryMeter | None = None
        self._device = torch.device("cpu")

    def all_stages(self) -> None:
        """Runs every stage of the scenario in order.

        Raises:
            UsageError: the scenario cannot be run.
            BaseException: whatever else a stage raises.
        """
        self._conditions.begin()
        self._device = choose_device(self._scenario.device)
        take_device(self._device)
        self._writer.write(Environment(values=describe_environment(self._device)))
        prepare_process(self._scenario, self._device)
        model = self._scenario.steps[0].model
        if model is not None and is_limited(model) and self._device.type == "cpu":
            _limit_memory(read_capsule(Path(model.name.removeprefix(MODEL))))
        self._meter = MemoryMeter(self._device)
        for index, stage in enumerate(self._scenario.steps):
            self._stage(index, stage)

    def abandon(self) -> None:
        """Stops measuring, and puts everything back."""
        self._stop_measuring()
        self._corrections.take_out()

    def finish(self, error: BaseException | None, libraries: Sequence[str] = ()) -> Totals:
        """Stops, and writes what only the end of a run knows; see :class:`dtypedoctor.worker.recording.Watch`.

        A device that no longer answers costs these records, nothing else.
        """
        if error is not None:
            self._instruments.note_exception(error)
        self._stop_measuring()
        record_left_out(self._writer)
        try:
            self._corrections.conclude()
            self._corrections.take_out()
            return Totals(
                steps=self._steps,
                device=str(self._device),
                peak_memory=self._meter.peak() + self._stock.taken_bytes if self._meter else 0,
                checksum=checksum(self._holder.built.model) if self._holder.built and self._look else None,
            )
        except RuntimeError as failed:
            self._instruments.note_exception(failed)
            return Totals(steps=self._steps)

    def _stop_measuring(self) -> None:
        self._instruments.stop()
        self._conditions.end()

    def _stage(self, index: int, stage: ScenarioStep) -> None:
        kind = stage.workload.kind
        self._writer.write(
            Stage(n=self._writer.next_n(), index=index, name=stage.name or f"step-{index + 1}", workload=kind)
        )
        if stage.model is not None:
            sharded = will_be_sharded(self._scenario, stage)
            self._holder.built = self._stock.take(stage.model, self._device, self._scenario.seed, on_host=sharded)
            self._corrections.install(self._holder.built.model)
        context = self._context(stage)
        workload = _workload(stage)
        self._instruments.begin_stage(self._steps + 1)
        self._instruments.start()
        if self._holder.built is not None:
            self._instruments.attach(self._holder.built.model)
        probed = stage.model is not None and not stage.model.name.startswith(MODEL)  # a capsule has only its one call
        sharded = will_be_sharded(self._scenario, stage)
        if probed and not sharded:
            context.probe_untrained()
        set_seed(self._scenario.seed)
        try:
            with (
                capturing(context, self._capture, self._directory),
                streaming(context),
                compiling(context),
                parallel(context) as meeting,
            ):
                if probed and sharded and meeting is not None:  # before, the weights were in the host's memory
                    began = time.monotonic()
                    raised = context.probe_untrained()
                    meeting.go_on_together(raised, _LATE_SECONDS + _LATE_TIMES * (time.monotonic() - began))
                    set_seed(self._scenario.seed)
                workload(context)
        finally:
            self._steps += context.steps_completed
        self._instruments.stop()

    def _context(self, stage: ScenarioStep) -> Context:
        return Context(
            scenario=self._scenario,
            stage=stage,
            holder=self._holder,
            device=self._device,
            instruments=self._instruments,
            region=lambda: region(stage.autocast, self._device),
            scratch=self._directory / "scratch",
            pause=self._corrections.counters,
            steps_before=self._steps,
            look=self._look,
        )


def _workload(stage: ScenarioStep) -> Callable[[Context], None]:
    """The function that does what the stage asks for.

    Raises:
        UsageError: nobody has registered it, or its code cannot be imported.
    """
    spec = stage.workload
    name = spec.name if isinstance(spec, Plugin) else spec.kind
    found = registered(Workload).get(name)
    if found is None:
        raise UsageError(f"there is no workload {name!r}", known(Workload))
    try:
        run: Callable[[Context], None] = resolve(found.run)
    except ImportError as error:
        raise UsageError(f"workload {name}: cannot import {found.run}: {error}") from error
    return run


def prepare_process(scenario: Scenario, device: torch.device) -> None:
    """Settings of the whole process, made before a model is built."""
    if device.type == "cpu" and all(
        (stage.model is None or stage.model.name.startswith((BUILTIN, MODEL))) for stage in scenario.steps
    ):
        torch.set_num_threads(1)  # tiny models gain nothing from more, and sums then do not depend on the machine
    if scenario.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(scenario.deterministic, warn_only=True)


def choose_device(wanted: str) -> torch.device:
    """The device for ``auto``, ``cpu`` or ``cuda``.

    Raises:
        UsageError: CUDA is wanted where there is none.
    """
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise UsageError("this scenario needs a CUDA device and there is none", "Run it with `--device cpu`.")
    return torch.device("cuda" if available and wanted != "cpu" else "cpu")


def region(spec: Autocast | None, device: torch.device) -> AbstractContextManager[Any]:
    """The autocast region that a scenario asks for."""
    if spec is None:
        return nullcontext()
    return torch.autocast(device.type if spec.device == "auto" else spec.device, dtype=getattr(torch, spec.dtype))


_FIXED = 4 << 30
"""Bytes for activations, and for what the libraries allocate."""
_TIMES = 16
"""How often the tensors fit beside that: in two dtypes, with gradients, and once more in float32."""


def _limit_memory(capsule: Capsule) -> None:
    """Bounds what this process may allocate from now on, by the size of the tensors and by the memory that is free.

    A few numbers in a capsule (labels of a configuration, steps of an operator) can ask for any amount of memory.
    Not to be called where CUDA is used, which maps far more than it needs.

    Raises:
        UsageError: the capsule is damaged.
    """
    room = min(_FIXED + _TIMES * capsule.memory, _bytes("/proc/meminfo", "MemAvailable"))
    limit = _bytes("/proc/self/status", "VmData") + room
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _bytes(path: str, key: str) -> int:
    """A line `KEY: N kB` of a file of the kernel."""
    lines = dict(line.split(":", 1) for line in Path(path).read_text(encoding="utf-8").splitlines() if ":" in line)
    return int(lines[key].split()[0]) << 10


def serve_rank(directory: Path) -> None:
    """Leaves the trace and the output of this rank in its directory.

    Raises:
        RuntimeError: the process was not started by torchrun.
    """
    here = member_of_torchrun()
    if here is None:
        raise RuntimeError("RANK and WORLD_SIZE are not set: this process was not started by torchrun")
    own = rank_directory(directory, here.rank)
    for descriptor, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        with append_file(own / name, mode=0o600) as file:
            os.dup2(file.fileno(), descriptor)
    leave(serve(own))


if __name__ == "__main__":
    serve_rank(Path(sys.argv[1]))
