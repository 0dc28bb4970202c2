"""A worker: one process, one scenario, one trace."""

import gc
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import buffers_of, parameters_of
from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.budget import budget_of
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.interruptions import contained
from dtypedoctor.lab.corrections.interventions import Conditions, StageCorrections, record_left_out
from dtypedoctor.lab.models.build import Built, build, set_seed
from dtypedoctor.lab.scenarios.model import Autocast, Model, Plugin, Request, Scenario, ScenarioStep, is_limited
from dtypedoctor.lab.worker.stage import capturing, compiling, streaming
from dtypedoctor.lab.workloads.context import Context, Holder
from dtypedoctor.plugins import BUILTIN, Workload, known, registered, resolve
from dtypedoctor.redaction.redact import read_request
from dtypedoctor.replay.capsule import MODEL, UNLIMITED, read_capsule
from dtypedoctor.trace.events import Environment, Stage
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.worker.call_fixes import is_out_of_memory
from dtypedoctor.worker.environment import (
    checksum,
    describe_environment,
    memory_of,
    peak_resident,
    resident,
    tensor_digests,
)
from dtypedoctor.worker.recording import Recording, Totals

_WITH_COPY, _WITHOUT_COPY = 4.0, 2.5
"""How often the weights have to fit into what is free beside them, for a copy of them to be kept there, and for the model to stay at all: a
float32 reference takes twice as much as weights in half precision."""


class NotRestoredError(Exception):
    """A model is not what it was when it was built; the message says in what."""


@dataclass(frozen=True, slots=True)
class _Place:
    """A parameter or buffer as it was built.

    Attributes:
        name: dotted name.
        tensor: the object.
        digest: of its bits.
        copy: the bits themselves; None where there was no room for them.
        trained: whether it required gradients.
    """

    name: str
    tensor: Tensor
    digest: int
    copy: Tensor | None
    trained: bool


class Pristine:
    """A model as it was built.

    Args:
        model: just built.

    Attributes:
        may_stay: whether there is room for a float32 reference beside it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        keeps_copy = _fits(model, _WITH_COPY)
        self.may_stay = _fits(model, _WITHOUT_COPY)
        named = list(_tensors(model))
        digests = tensor_digests([tensor for _, tensor in named])
        self._places = [
            _Place(
                name=name,
                tensor=tensor,
                digest=digest,
                copy=tensor.detach().clone() if keeps_copy else None,
                trained=tensor.requires_grad,
            )
            for (name, tensor), digest in zip(named, digests, strict=True)
        ]
        self._training = {module: module.training for module in model.modules()}
        self._shape = _shape(model)

    def put_back(self) -> None:
        """Makes the model what it was.

        Raises:
            NotRestoredError: it cannot be made so.
        """
        for module, training in self._training.items():
            module.training = training
        if (difference := _difference(self._shape, _shape(self._model))) is not None:
            raise NotRestoredError(difference)
        for place in self._places:
            place.tensor.grad = None
            place.tensor.requires_grad_(place.trained)
        changed = _with_other_values(self._places)
        with torch.no_grad():
            for place in changed:
                if place.copy is not None:
                    place.tensor.copy_(place.copy)
        for place in _with_other_values(changed):
            raise NotRestoredError(f"{place.name} has other values")


class Stock:
    """The models of a process: those that were built in advance stay for all of its runs, others go after theirs."""

    def __init__(self) -> None:
        self._built: dict[str, tuple[Built, Pristine]] = {}
        self.taken_bytes = 0
        """Memory of the models that a run took out of the stock: a run that builds them itself measures it as its own."""

    def fill(self, scenario: Scenario, device: torch.device) -> None:
        """Builds the scenario's models, which stay where a device has room for those of other runs beside them.

        Raises:
            UsageError: a model cannot be built.
        """
        for spec in (step.model for step in scenario.steps if step.model is not None):
            built = build(spec, device, scenario.seed)
            pristine = Pristine(built.model)
            if pristine.may_stay:
                self._built[_key(spec, device, scenario.seed)] = built, pristine
            else:
                print("the model is loaded for each run: it takes too much memory to stay", file=sys.stderr, flush=True)
        gc.collect()
        gc.freeze()  # what stays need not be searched for garbage before each run

    def take(self, spec: Model, device: torch.device, seed: int) -> Built:
        """The model that ``spec`` asks for, out of the stock or built now.

        Raises:
            UsageError: it cannot be built.
        """
        key = _key(spec, device, seed)
        if key not in self._built:
            return build(spec, device, seed)
        built, _ = self._built[key]
        self.taken_bytes += sum(t.numel() * t.element_size() for t in built.model.state_dict().values())
        return built

    def put_back(self) -> None:
        """Makes all models that stay what they were.

        Raises:
            NotRestoredError: one cannot be made so.
        """
        self.taken_bytes = 0
        gc.collect()
        for _, pristine in self._built.values():
            pristine.put_back()
        if torch.cuda.is_initialized() and _kept_by_allocator() > _WORTH_FREEING:
            torch.cuda.empty_cache()  # whose models and gradients the last run has left; where the next model's parts go depends on what is free


def _key(spec: Model, device: torch.device, seed: int) -> str:
    """Says of a model all that its building depends on."""
    return f"{device} {seed} {spec.model_dump_json()}"


def _with_other_values(places: Sequence[_Place]) -> list[_Place]:
    """Those whose tensor does not hold the bits that it was built with."""
    digests = tensor_digests([place.tensor for place in places])
    return [place for place, digest in zip(places, digests, strict=True) if digest != place.digest]


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each parameter and buffer once, however many names it has."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def _fits(model: nn.Module, times: float) -> bool:
    """Whether each device that holds weights has room for them so often again."""
    taken: Counter[torch.device] = Counter()
    for _, tensor in _tensors(model):
        taken[tensor.device] += tensor.numel() * tensor.element_size()
    return all(held * times <= _free(device) for device, held in taken.items())


_WORTH_FREEING = 1 << 30


def _kept_by_allocator() -> int:
    """Bytes of all GPUs that no tensor has and that nobody else can have."""
    return sum(
        torch.cuda.memory_reserved(one) - torch.cuda.memory_allocated(one) for one in range(torch.cuda.device_count())
    )


def _free(device: torch.device) -> int:
    """Bytes that are free there."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else memory_of("MemAvailable", "/proc/meminfo")


_Shape = dict[str, tuple[Any, ...]]


def _shape(model: nn.Module) -> _Shape:
    """By dotted name what each module is: its class, its attributes, hooks and tensors by identity, dtype, shape and place in memory."""
    found: _Shape = {}
    for name, module in model.named_modules():
        tensors = {**parameters_of(module), **buffers_of(module)}
        own = {key: _identity(value) for key, value in vars(module).items() if key != "training"}
        hooks = [list(table) for key, table in vars(module).items() if key.endswith("_hooks") and table]
        facts = {key: _facts(tensor) for key, tensor in tensors.items() if tensor is not None}
        found[name] = (type(module), own, hooks, facts)
    return found


def _identity(value: Any) -> Any:
    """What an attribute is told by: plain values by themselves, everything else as the object that it is."""
    return value if isinstance(value, (str, int, float, bool, type(None))) else id(value)


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return id(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride(), str(tensor.device)


def _difference(before: _Shape, after: _Shape) -> str | None:
    """The first module that is not what it was; None where all are."""
    for name in before.keys() | after.keys():
        if before.get(name) != after.get(name):
            return f"{name or 'the model'} is not what was built"
    return None


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
        self._look_steps = request.look_steps
        self._stock = stock
        self._writer = writer
        budget = budget_of(request.scenario.overhead_budget)
        self._instruments = Instruments(writer, watch=request.watch, budget=budget, look_steps=request.look_steps)
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
        self._writer.write(Environment(values=describe_environment(self._device)))
        prepare_process(self._scenario, self._device)
        model = self._scenario.steps[0].model
        if model is not None and is_limited(model) and self._device.type == "cpu":
            # Bounds what this process may allocate from now on, by the size of the tensors and by the memory that is free
            capsule = read_capsule(Path(model.name.removeprefix(MODEL)))
            room = min(_FIXED + _TIMES * capsule.memory, memory_of("MemAvailable", "/proc/meminfo"))
            limit = memory_of("VmData") + room
            soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
            if soft == resource.RLIM_INFINITY or limit < soft:
                resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
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
                checksum=checksum(self._holder.built.model) if self._holder.built and self._look_steps != 0 else None,
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
            self._holder.built = self._stock.take(stage.model, self._device, self._scenario.seed)
            self._corrections.install(self._holder.built.model)
        context = self._context(stage)
        # The function that does what the stage asks for
        spec = stage.workload
        name = spec.name if isinstance(spec, Plugin) else spec.kind
        found = registered(Workload).get(name)
        if found is None:
            raise UsageError(f"there is no workload {name!r}", known(Workload))
        try:
            workload: Callable[[Context], None] = resolve(found.run)
        except ImportError as error:
            raise UsageError(f"workload {name}: cannot import {found.run}: {error}") from error
        self._instruments.begin_stage(self._steps + 1)
        self._instruments.start()
        if self._holder.built is not None:
            self._instruments.attach(self._holder.built.model)
        if stage.model is not None and not stage.model.name.startswith(MODEL):  # a capsule has only its one call
            context.probe_untrained()
        set_seed(self._scenario.seed)
        try:
            with capturing(context, self._capture, self._directory), streaming(context), compiling(context):
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
            look_steps=self._look_steps,
        )


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


class MemoryMeter:
    """Peak memory over what was in use when the meter was made.

    On CUDA the allocator's peak, of all devices together; on a CPU the peak resident size of the process as Linux counts it (``VmHWM``), which is
    reset first. Where the kernel does not allow the reset the peak is that of the whole process.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            for gpu in range(torch.cuda.device_count()):
                torch.cuda.reset_peak_memory_stats(gpu)
            self._base = sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))
        else:
            with suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")
            self._base = resident()

    def peak(self) -> int:
        """Bytes over the baseline."""
        if self._device.type == "cuda":
            return sum(map(torch.cuda.max_memory_allocated, range(torch.cuda.device_count()))) - self._base
        return max(0, peak_resident() - self._base)
