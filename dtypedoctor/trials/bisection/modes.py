"""The modes that a verdict table compares: the same model and batch, run in another way."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dtypedoctor.scenario.model import Forward, Generate, Scenario, Train
from dtypedoctor.trials.bisection.probes import Workload, describe, reference, with_kept

__all__ = ["Mode", "modes"]

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


def modes(base: Workload, ladder: Sequence[Workload], culprits: Sequence[str] = ()) -> tuple[Mode, ...]:
    """The modes that are worth running for a scenario.

    Args:
        base: the workload that shows the failure; attention, autocast, dtype and compiler are changed on it.
        ladder: the workloads from cheap to whole, which separate forward, backward and optimizer.
        culprits: what must be kept in float32. With these kept, a backward pass that fails fails for a reason of its own.
    """
    both = _forward_and_backward(ladder)
    passes = ladder if both is None else sorted((*ladder, both), key=_rank)
    found = [Mode(name=w.words, scenario=w.scenario) for w in passes]
    stage = base.scenario.steps[-1]
    if len(base.scenario.steps) == 1 and stage.model is not None:
        found += _changed_modes(base.scenario, passes)
        found += _modes_with_culprits(both or base, culprits) if culprits else ()
        found += _compiled_modes(base.scenario, both or base, culprits)
    return tuple(m for i, m in enumerate(found) if m.scenario not in [earlier.scenario for earlier in found[:i]])


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


def _modes_with_culprits(workload: Workload, culprits: Sequence[str]) -> Iterator[Mode]:
    yield Mode(name="culprits in float32", scenario=with_kept(workload.scenario, culprits))


def _compiled_modes(scenario: Scenario, both: Workload, culprits: Sequence[str]) -> Iterator[Mode]:
    """Inductor's code for the failing pass; and whether a compiled backward pass fails where the culprits cannot.

    The second needs no generated code: ``aot_eager`` traces and splits the backward pass as inductor does, and runs it with
    torch's own kernels, in a sixth of the time.
    """
    stage = scenario.steps[0]
    if stage.compile is not None:
        yield Mode(name="not compiled", scenario=_with(scenario, compile=None))
    elif not isinstance(stage.workload, Generate):
        yield Mode(name="compiled (inductor)", scenario=_with(scenario, compile={"backend": "inductor"}))
        if culprits:
            kept = with_kept(both.scenario, culprits)
            name = "compiled (aot_eager), culprits in float32"
            yield Mode(name=name, scenario=_with(kept, compile={"backend": "aot_eager"}))


def _forward_and_backward(ladder: Sequence[Workload]) -> Workload | None:
    """The plain pass of a ladder with its backward pass; None for a scenario that only generates, or that has no plain pass."""
    if isinstance(ladder[-1].scenario.steps[-1].workload, Generate):
        return None
    for workload in ladder:
        work = workload.scenario.steps[0].workload
        if isinstance(work, Forward) and len(workload.scenario.steps) == 1:
            changed = _with(workload.scenario, workload=work.model_dump() | {"backward": True})
            return Workload(words=describe(changed), scenario=changed)
    return None


def _rank(workload: Workload) -> int:
    """Forward passes, then those with a backward pass, then everything else as it was."""
    if not isinstance(workload.scenario.steps[0].workload, Forward):
        return 2
    return int(_has_backward(workload.scenario))


def _training_modes(ladder: Sequence[Workload]) -> Iterator[Mode]:
    """Modes that need gradients, each on the cheapest workload that can have it."""
    training = next((w.scenario for w in ladder if _has_backward(w.scenario)), None)
    if training is not None and (model := training.steps[0].model) is not None:
        name = "without gradient checkpointing" if model.gradient_checkpointing else "gradient checkpointing"
        changed = _with(training, model={"gradient_checkpointing": not model.gradient_checkpointing})
        yield Mode(name=name, scenario=changed)
    loop = next((w.scenario for w in ladder if isinstance(w.scenario.steps[0].workload, Train)), None)
    if loop is not None:
        scaled = loop.steps[0].grad_scaler
        yield Mode(name="without loss scale" if scaled else "loss scale", scenario=_with(loop, grad_scaler=not scaled))


def _has_backward(scenario: Scenario) -> bool:
    work = scenario.steps[0].workload
    return isinstance(work, Train) or bool(getattr(work, "backward", False))


def _with(scenario: Scenario, model: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    step = scenario.model_dump()["steps"][0]
    step |= changes
    if model is not None:
        step["model"] |= model
    return scenario.with_changes(steps=[step])
