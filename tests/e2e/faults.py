"""Ends real, watched trainings in every way there is, and holds what the report says against what really happened."""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from doomed_training import COUNT, FINISHED, FINISHED_AT, HEAD
from exec_corpus import serve
from forked_script import redirect
from nursery import Child, fork
from patience import becomes

from dtypedoctor.examination.examine import examine
from dtypedoctor.lab.runner.launch import run_script_of
from dtypedoctor.lab.scenarios.model import Request, Scenario, ScenarioStep, Script
from dtypedoctor.redaction.redact import REQUEST
from dtypedoctor.report.build import build_report
from dtypedoctor.report.to_json import Report
from dtypedoctor.runner.run import Run, WorkerExit, collect

SCRIPT = Path(__file__).with_name("doomed_training.py")
FROM_INSIDE = ("exception", "os._exit", "abort", "null pointer", "SIGSEGV", "SIGKILL", "out of memory", "hang")
FROM_OUTSIDE = ("SIGKILL from outside", "SIGTERM", "SIGINT")
WAYS = FROM_INSIDE + FROM_OUTSIDE
"""Every way in which a training is ended here."""
ON_A_GPU = ("device-side assert", "illegal address", "out of device memory", "SIGKILL")
"""Ways in which a training on a GPU is ended; the work of the device is behind that of the host."""
WHERE = ("enter", "leave", "backward", "optimizer")
CALLS_A_STEP = 32
"""Module calls in one step of the training."""
GROUP = Path("/sys/fs/cgroup/memory")
MEMORY = 700 << 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a training is to end."""

    kind: str
    where: str
    after: int
    overflow_in: int = 0
    steps: int = 8
    seed: int = 0
    device: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Truth:
    """What the training itself has written down."""

    entered: int
    left: int
    step: int
    module: str
    times_left: dict[str, int]
    finished: int
    """On a GPU: module calls whose work was done."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A training that was ended: what it did, and what the doctor makes of it."""

    plan: Plan
    truth: Truth
    run: Run
    report: Report

    @property
    def lost(self) -> dict[str, int]:
        """For each module how many of its finished calls are not in the trace."""
        known = Counter(fqn for fqn, _ in self._recorded())
        measured = {site.fqn for site in self.run.trace.sites.values() if site.kind == "output"}
        return {
            name: times - known[name]
            for name, times in self.truth.times_left.items()
            if times > known[name] and (name in measured or not known)
        }

    @property
    def recorded(self) -> int:
        """How many module calls are in the trace."""
        return len(self._recorded())

    def _recorded(self) -> set[tuple[str, int]]:
        """Module calls whose output was measured; every module is called once per outermost call here."""
        sites = self.run.trace.sites
        return {(sites[s.site].fqn, s.call) for s in self.run.trace.samples if sites[s.site].kind == "output"}


def plans(number: int, seed: int) -> Iterator[Plan]:
    """Trainings with random ends, each way as often as the others."""
    dice = random.Random(seed)
    for index in range(number):
        kind = WAYS[index % len(WAYS)]
        where = dice.choice(WHERE) if kind in FROM_INSIDE else "outside"
        steps = 8
        counted = CALLS_A_STEP * steps if where in ("enter", "leave") else steps
        yield Plan(
            kind=kind,
            where=where,
            after=dice.randint(1, counted),
            overflow_in=dice.choice((0, 0, 2, 5)),
            steps=steps if kind in FROM_INSIDE else 10_000,
            seed=dice.randrange(1000),
        )


def end(plan: Plan, folder: Path) -> Ended:
    """Runs a training to its end."""
    work, directory = folder / "work", folder / "run"
    work.mkdir(parents=True)
    (work / "doom.json").write_text(json.dumps(vars(plan)))
    scenario = Scenario(
        name="doomed",
        summary="A training that is ended.",
        deterministic=False,
        steps=[ScenarioStep(workload=Script(kind="script", path=str(SCRIPT)))],
    )
    start = _forked if plan.device == "cpu" else _fresh
    run = start(plan, Request(scenario=scenario), work, directory)
    report = build_report(examine(scenario.model_dump(mode="json"), run), command="", files={}, next_command="")
    return Ended(plan=plan, truth=read_truth(work), run=run, report=report)


def _fresh(_: Plan, request: Request, work: Path, directory: Path) -> Run:
    """In an interpreter of its own, as `dtypedoctor exec` does: what a library does to CUDA does not survive a fork."""
    with chdir(work):
        return run_script_of(request, directory, live=False)


def _forked(plan: Plan, request: Request, work: Path, directory: Path) -> Run:
    """In a fork of a process that has torch and transformers imported."""
    directory.mkdir()
    (directory / REQUEST).write_text(request.to_text())
    began = time.monotonic()
    with limited_memory(plan) as group:
        child = fork(live, work, directory, group)
        timed_out = _follow(child, plan, work)
        code = child.wait()
    return collect(
        directory, WorkerExit(code=code, timed_out=timed_out, seconds=time.monotonic() - began), foreign=True
    )


def live(work: Path, directory: Path, group: Path | None) -> int:
    """The child's side."""
    import torch

    faulthandler.disable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs of a shell ignore it
    if group is not None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
    redirect(directory / "output.txt")
    os.chdir(work)
    torch.set_num_threads(1)
    return serve(directory)


def _follow(child: Child, plan: Plan, work: Path) -> bool:
    """Ends the child from outside where the plan says so; whether it was stopped because it hung."""
    if plan.kind in FROM_OUTSIDE:
        number = signal.SIGKILL if plan.kind.startswith("SIGKILL") else getattr(signal, plan.kind)
        while _entered(work) < 5 * plan.after and not child.over():
            time.sleep(0.002)
        with suppress(ProcessLookupError):
            os.kill(child.pid, number)
    elif plan.kind == "hang":
        becomes(lambda: (work / "hangs").exists() or child.over())
        if not child.over():
            os.kill(child.pid, signal.SIGKILL)  # as a time limit does
            return True
    return False


def _entered(work: Path) -> int:
    try:
        return int(HEAD.unpack_from((work / "truth.bin").read_bytes())[0])
    except (OSError, struct.error):  # it has not begun
        return 0


def read_truth(work: Path) -> Truth:
    """What the training has written down about itself."""
    data = (work / "truth.bin").read_bytes()
    names = json.loads((work / "names.json").read_text())
    entered, left, step, last = HEAD.unpack_from(data)
    times = {name: COUNT.unpack_from(data, HEAD.size + COUNT.size * i)[0] for i, name in enumerate(names)}
    (finished,) = FINISHED.unpack_from(data, FINISHED_AT)
    return Truth(entered=entered, left=left, step=step, module=names[last], times_left=times, finished=finished)


@contextmanager
def limited_memory(plan: Plan) -> Iterator[Path | None]:
    """A control group whose processes the kernel kills when they take too much memory; None where there are no such groups."""
    if plan.kind != "out of memory" or not can_limit_memory():
        yield None
        return
    group = GROUP / f"dtypedoctor-{os.getpid()}-{plan.seed}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(MEMORY))
    try:
        yield group
    finally:
        group.rmdir()


def can_limit_memory() -> bool:
    """Whether this process may make control groups (version 1)."""
    return os.access(GROUP, os.W_OK) and (GROUP / "memory.limit_in_bytes").exists()


def ways() -> tuple[str, ...]:
    """The ways that are possible here: without control groups nothing ends a process that takes too much memory."""
    return WAYS if can_limit_memory() else tuple(way for way in WAYS if way != "out of memory")


def mistakes(ended: Ended) -> Iterator[str]:
    """What the report or the trace has wrong, in words."""
    plan, truth, run, report = ended.plan, ended.truth, ended.run, ended.report
    cursor = run.trace.cursor
    if run.trace.damage:
        yield f"damage: {run.trace.damage}"
    if ended.lost:
        yield f"finished calls lost: {ended.lost}"
    if cursor is None or cursor.site is None:
        yield "no module named"
    elif (cursor.site.fqn, cursor.step) != (truth.module, truth.step) and not _just_entered(ended):
        yield f"named {cursor.site.fqn!r} in step {cursor.step}, was in {truth.module!r} in step {truth.step}"
    said = " ".join((report.headline, *report.coverage, *(f.fqn or "" for f in report.findings)))
    silent = run.trace.end is None
    if silent and truth.module not in said and not _just_entered(ended):
        yield f"the report does not name {truth.module!r}: {said}"
    if silent and "float32" not in said:
        yield "the report names no dtype"
    if silent and not any("missing" in line for line in report.coverage):
        yield "the report does not say what was lost"
    if _overflowed(ended) and "model.layers.1.mlp.down_proj" not in said:
        yield f"the report does not name what was not finite first: {said}"
    if (plan.kind in ("exception", "SIGINT")) != (run.trace.end is not None):
        yield f"{plan.kind}: end record {run.trace.end}"


def _just_entered(ended: Ended) -> bool:
    """Whether the signal came from outside, in the moment between the doctor's hook and the training's own."""
    return ended.plan.kind in FROM_OUTSIDE


def _overflowed(ended: Ended) -> bool:
    """Whether the infinite weight has come out of its module, one whole step ago for signals from outside."""
    plan, truth = ended.plan, ended.truth
    done = truth.times_left.get("model.layers.1.mlp.down_proj", 0)
    return 0 < plan.overflow_in <= done - (plan.kind in FROM_OUTSIDE)


def plans_on_a_gpu(times: int) -> Iterator[Plan]:
    dice = random.Random(3)
    for index in range(times * len(ON_A_GPU)):
        kind = ON_A_GPU[index % len(ON_A_GPU)]
        where = dice.choice(("enter", "leave"))
        yield Plan(kind=kind, where=where, after=dice.randint(1, CALLS_A_STEP * 8), seed=index, device="cuda")


def mistakes_on_a_gpu(ended: Ended) -> Iterator[str]:
    """What is wrong about a training on a GPU; what was in flight may be lost."""
    truth, run, report = ended.truth, ended.run, ended.report
    cursor = run.trace.cursor
    if run.trace.damage:
        yield f"damage: {run.trace.damage}"
    if cursor is None or cursor.site is None or cursor.site.fqn != truth.module:
        yield f"named {cursor}, was in {truth.module}"
    if run.trace.end is None and truth.module not in " ".join((report.headline, *report.coverage)):
        yield f"the report does not name {truth.module!r}: {report.headline}"
    if report.status == "healthy":
        yield f"called healthy: {report.headline}"
    if report.findings:
        yield f"found where everything is finite: {report.headline}"
