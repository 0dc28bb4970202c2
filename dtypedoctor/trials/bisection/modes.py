"""The verdict table: the same model and batch in other modes, each of them run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dtypedoctor.errors import UsageError
from dtypedoctor.scenario.model import Generate, Scenario, Train
from dtypedoctor.scenario.request import Request
from dtypedoctor.trials.bisection.laboratory import Laboratory
from dtypedoctor.trials.bisection.probes import Workload, describe, reference
from dtypedoctor.trials.bisection.symptoms import Kind, Symptom, refused, symptom_of
from dtypedoctor.trials.reduction import Outcome

__all__ = ["Mode", "Verdict", "measure", "modes"]

_OTHER = {"float16": "bfloat16", "bfloat16": "float16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A way of running.

    Attributes:
        name: what is different.
        scenario: the whole of it.
    """

    name: str
    scenario: Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A row of the table: a mode and what it came to.

    Attributes:
        workload: what was run, in a few words.
        outcome: relative to the failure under bisection.
    """

    mode: str
    workload: str
    outcome: Outcome
    symptom: Symptom


def modes(base: Workload, ladder: Sequence[Workload]) -> tuple[Mode, ...]:
    """The modes that are worth running for a scenario.

    Args:
        base: the workload that shows the failure; attention, autocast, dtype and compiler are changed on it.
        ladder: the workloads from cheap to whole, which separate forward, backward and optimizer.
    """
    found = [Mode(name=w.words, scenario=w.scenario) for w in ladder]
    stage = base.scenario.steps[-1]
    if len(base.scenario.steps) == 1 and stage.model is not None:
        found += _changed_modes(base.scenario, ladder)
    return tuple(m for i, m in enumerate(found) if m.scenario not in [earlier.scenario for earlier in found[:i]])


def measure(lab: Laboratory, wanted: Sequence[Mode], failure: Symptom) -> tuple[Verdict, ...]:
    """Runs every mode. Finiteness and exceptions decide: how exact a mode is, is not asked here."""
    order = sorted(range(len(wanted)), key=lambda index: not _compiles(wanted[index]))  # the slowest first
    rows: dict[int, Symptom] = {}
    for done in lab.run_all([Request(scenario=wanted[index].scenario) for index in order]):
        run = done.run
        rows[order[done.index]] = refused(run.message) if isinstance(run, UsageError) else symptom_of(run)
    return tuple(
        Verdict(
            mode=mode.name,
            workload=describe(mode.scenario),
            outcome=rows[index].outcome(failure),
            symptom=rows[index],
        )
        for index, mode in enumerate(wanted)
        if rows[index].kind is not Kind.REFUSED  # what the model cannot do is no verdict about it
    )


def _changed_modes(scenario: Scenario, ladder: Sequence[Workload]) -> Iterator[Mode]:
    stage = scenario.steps[0]
    assert stage.model is not None  # the caller has looked
    yield Mode(name="float32 throughout", scenario=reference(scenario))
    other = _OTHER.get(stage.model.dtype)
    if other is not None:
        yield Mode(name=f"model in {other}", scenario=_with(scenario, model={"dtype": other}))
    for attention in ("eager", "sdpa"):
        if stage.model.attention != attention:
            yield Mode(name=f"{attention} attention", scenario=_with(scenario, model={"attention": attention}))
    if stage.autocast is not None:
        yield Mode(name="without autocast", scenario=_with(scenario, autocast=None))
    for dtype in ("float16", "bfloat16"):
        if stage.autocast is None or stage.autocast.dtype != dtype:
            yield Mode(name=f"{dtype} autocast", scenario=_with(scenario, autocast={"dtype": dtype}))
    yield from _training_modes(ladder)
    if stage.compile is not None:
        yield Mode(name="not compiled", scenario=_with(scenario, compile=None))
    elif not isinstance(stage.workload, Generate):
        yield Mode(name="compiled (inductor)", scenario=_with(scenario, compile={"backend": "inductor"}))


def _training_modes(ladder: Sequence[Workload]) -> Iterator[Mode]:
    """Modes that need gradients, on the cheapest workload that has them."""
    training = next((w.scenario for w in ladder if _has_backward(w.scenario)), None)
    if training is not None and (model := training.steps[0].model) is not None:
        name = "without gradient checkpointing" if model.gradient_checkpointing else "gradient checkpointing"
        changed = _with(training, model={"gradient_checkpointing": not model.gradient_checkpointing})
        yield Mode(name=name, scenario=changed)
    loop = next((w.scenario for w in ladder if isinstance(w.scenario.steps[0].workload, Train)), None)
    if loop is not None:
        scaled = loop.steps[0].grad_scaler
        yield Mode(name="without loss scale" if scaled else "loss scale", scenario=_with(loop, grad_scaler=not scaled))


def _compiles(mode: Mode) -> bool:
    return any(step.compile is not None for step in mode.scenario.steps)


def _has_backward(scenario: Scenario) -> bool:
    work = scenario.steps[0].workload
    return isinstance(work, Train) or bool(getattr(work, "backward", False))


def _with(scenario: Scenario, model: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    step = scenario.model_dump()["steps"][0]
    step |= changes
    if model is not None:
        step["model"] |= model
    return scenario.with_changes(steps=[step])
