"""A worker: one process, one scenario, one trace."""

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import set_seed

from dtypedoctor.corrections.contract import Installed, put_in
from dtypedoctor.errors import UsageError
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.instrument.optrace import OpWindow
from dtypedoctor.interruptions import noticing
from dtypedoctor.models.build import BUILTIN
from dtypedoctor.plugins import Workload, known, left_out, registered, resolve
from dtypedoctor.redaction.redact import read_request
from dtypedoctor.scenario.model import Autocast, CorrectionSpec, Plugin, Scenario, ScenarioStep
from dtypedoctor.scenario.request import Request
from dtypedoctor.trace.events import Correction, End, Environment, NotWatched, Refused, Resources, Stage
from dtypedoctor.trace.ranks import header
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.worker.conditions import Conditions
from dtypedoctor.worker.environment import MemoryMeter, checksum, describe_environment
from dtypedoctor.worker.stage import capturing, compiling, parallel, streaming, take_device
from dtypedoctor.worker.stock import Stock
from dtypedoctor.workloads.context import Context, Holder


def serve(directory: Path, stock: Stock | None = None) -> int:
    """Does what ``DIRECTORY/request.json`` asks for and leaves the trace beside it.

    Args:
        directory: where the request lies.
        stock: models that are built already.

    Returns:
        0 if the scenario ran to its end, 1 if an exception ended it, 2 if the scenario cannot be run at all.
    """
    request = Request.model_validate_json(read_request(directory))
    writer = TraceWriter(directory)
    writer.write(header(watched=request.watch))
    instruments = Instruments(
        writer,
        watch=request.watch,
        windows=[OpWindow(**window.model_dump()) for window in request.windows],
        every=1 if request.windows else request.scenario.watch_every,
    )
    run = _Run(request, instruments, directory, stock or Stock())
    conditions = Conditions(writer, request.scenario.conditions)
    conditions.begin()
    outcome = "completed"
    try:
        run.all_stages()
    except UsageError as error:
        writer.write(Refused(message=error.message, hint=error.hint))
        outcome = "refused"
    except BaseException as error:  # noqa: BLE001  (whatever ends the scenario is its result, also SystemExit)
        instruments.note_exception(error)
        outcome = "raised"
    finally:
        instruments.stop()
        conditions.end()
    run.conclude(outcome)
    writer.close()
    return {"completed": 0, "raised": 1, "refused": 2}[outcome]


class _Run:
    """The scenario's stages in one process."""

    def __init__(self, request: Request, instruments: Instruments, directory: Path, stock: Stock) -> None:
        self._scenario = request.scenario
        self._capture = request.capture
        self._stock = stock
        self._instruments = instruments
        self._writer = instruments.writer
        self._directory = directory
        self._holder = Holder()
        self._installed: dict[str, list[Installed]] = {}
        self._steps = 0
        self._began = time.perf_counter()
        self._meter: MemoryMeter | None = None
        self._device = torch.device("cpu")

    def all_stages(self) -> None:
        """Runs every step of the scenario in order."""
        self._device = choose_device(self._scenario.device)
        take_device(self._device)
        self._writer.write(Environment(values=describe_environment(self._device)))
        prepare_process(self._scenario)
        if self._device.type == "cpu" and all(_is_builtin(stage) for stage in self._scenario.steps):
            torch.set_num_threads(1)  # tiny models gain nothing from more, and sums then do not depend on the machine
        self._meter = MemoryMeter(self._device)
        for index, stage in enumerate(self._scenario.steps):
            self._stage(index, stage)

    def _stage(self, index: int, stage: ScenarioStep) -> None:
        kind = stage.workload.kind
        self._writer.write(
            Stage(n=self._writer.next_n(), index=index, name=stage.name or f"step-{index + 1}", workload=kind)
        )
        if stage.model is not None:
            self._holder.built = self._stock.take(stage.model, self._device, self._scenario.seed)
            self._correct(self._holder.built.model)
        context = self._context(stage)
        workload = _workload(stage)
        self._instruments.begin_stage(self._steps + 1)
        self._instruments.start()
        if self._holder.built is not None:
            self._instruments.attach(self._holder.built.model)
        if stage.model is not None:
            context.probe_untrained()
        set_seed(self._scenario.seed)
        try:
            with (
                capturing(context, self._capture, self._directory),
                streaming(context),
                compiling(context),
                parallel(context),
            ):
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
            pause=[installed.counters for several in self._installed.values() for installed in several],
            steps_before=self._steps,
        )

    def _correct(self, model: nn.Module) -> None:
        """Installs the scenario's corrections for ``model``; those for the model before it are taken out first."""
        self._take_out()
        for spec in self._scenario.corrections:
            self._install(spec, model)

    def _take_out(self) -> None:
        for installed in reversed([one for several in self._installed.values() for one in several]):
            installed.undo()

    def _install(self, spec: CorrectionSpec, model: nn.Module) -> None:
        record = Correction(n=self._writer.next_n(), id=spec.id, target="", installed=False)

        def refused(error: Exception) -> None:
            if not isinstance(error, UsageError):
                self._writer.write(replace(record, reason=f"{type(error).__name__}: {error}"))

        with noticing(refused, Exception):
            installed = put_in(spec.id, model, spec.modules)
        self._installed.setdefault(spec.id, []).append(installed)
        self._writer.write(replace(record, target=installed.target, installed=True, proof=installed.proof))

    def conclude(self, outcome: str) -> None:
        """Writes what only the end of a run knows. A device that no longer answers costs these records, nothing else."""
        for one in left_out():
            self._writer.write(NotWatched(what=one.what, why=f"it cannot be used: {one.why}"))
        try:
            self._conclude_corrections()
            self._conclude_resources()
        except RuntimeError as error:
            self._instruments.note_exception(error)
        self._writer.write(End(n=self._writer.next_n(), outcome=outcome, steps_completed=self._steps))

    def _conclude_corrections(self) -> None:
        for name, several in self._installed.items():
            self._writer.write(
                Correction(
                    n=self._writer.next_n(),
                    id=name,
                    target=several[-1].target,
                    installed=True,
                    proof=several[-1].proof,
                    hits=sum(one.counters.hits for one in several),
                    rescued=sum(one.counters.elements("rescued") for one in several),
                    clamped=sum(one.counters.elements("clamped") for one in several),
                )
            )
        self._take_out()

    def _conclude_resources(self) -> None:
        self._writer.write(
            Resources(
                seconds=time.perf_counter() - self._began,
                peak_memory=self._meter.peak() if self._meter else 0,
                device=str(self._device),
                checksum=checksum(self._holder.built.model) if self._holder.built else None,
            )
        )


def _is_builtin(stage: ScenarioStep) -> bool:
    return stage.model is None or stage.model.name.startswith(BUILTIN)


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


def prepare_process(scenario: Scenario) -> None:
    """Settings of the whole process, made before a model is built."""
    if scenario.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)


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
