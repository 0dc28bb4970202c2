"""Scenarios derived from the one under bisection: cheaper workloads, treated runs, and the float32 reference."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dtypedoctor.scenario.model import Forward, Generate, Grpo, Scenario, Sft, Train

__all__ = ["Workload", "cheaper", "narrow_dtype", "perturbed", "reference", "samples_tokens", "unrounded", "with_kept"]

KEEP = "keep-float32"

SEEDS = (1, 2)
"""Of the moved weights; the tolerance is taken from the run that they change most."""

LONGEST_PLAIN_TRAINING = 4
"""Steps up to which a plain training loop is worth trying in the place of a trainer."""

_TRAINERS = (Grpo, Sft, Train)
_HALF = ("float16", "bfloat16")
_AMP = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A scenario that may stand for the one under bisection.

    Attributes:
        words: what it does, e.g. ``one forward pass``.
        scenario: the whole of it.
    """

    words: str
    scenario: Scenario


def cheaper(scenario: Scenario, phase: str | None, step: int | None) -> tuple[Workload, ...]:
    """What may show the same failure in less time, cheapest first; the scenario itself is last.

    Args:
        scenario: the one under bisection.
        phase, step: where it fails; None where that is not known.
    """
    whole = Workload(words=describe(scenario), scenario=scenario)
    if len(scenario.steps) > 1:
        return (whole,)
    found = [*_plain(scenario, phase, step), *_shortened(scenario, step), whole]
    return tuple(w for i, w in enumerate(found) if w.scenario not in [earlier.scenario for earlier in found[:i]])


def describe(scenario: Scenario) -> str:
    """What a scenario does, in a few words."""
    return ", then ".join(_describe(step.workload) for step in scenario.steps)


def with_kept(scenario: Scenario, modules: Sequence[str]) -> Scenario:
    """The scenario with these modules kept in float32; itself where there are none."""
    if not modules:
        return scenario
    present = scenario.model_dump()["corrections"]
    return scenario.with_changes(corrections=[*present, {"id": KEEP, "modules": list(modules)}])


def reference(scenario: Scenario) -> Scenario:
    """The scenario in float32: weights as its dtype rounds them, no autocast, no loss scale, not compiled, nothing corrected."""
    steps = scenario.model_dump()["steps"]
    for step in steps:
        if step["model"] is not None:
            step["model"]["float32_twin"] = True
        step |= {"autocast": None, "grad_scaler": False, "compile": None}
        if "mixed_precision" in step["workload"]:
            step["workload"]["mixed_precision"] = "no"
    return scenario.with_changes(steps=steps, corrections=[])


def unrounded(scenario: Scenario) -> Scenario:
    """The reference with the weights as they were before any dtype rounded them."""
    exact = reference(scenario)
    steps = exact.model_dump()["steps"]
    for step in steps:
        if step["model"] is not None:
            step["model"]["dtype"] = "float32"
    return exact.with_changes(steps=steps)


def perturbed(scenario: Scenario) -> tuple[Scenario, ...]:
    """The reference with every weight and gradient moved by one unit in the last place of the scenario's narrowest dtype, several times."""
    exact = reference(scenario)
    found = []
    for seed in SEEDS:
        steps = exact.model_dump()["steps"]
        for step in steps:
            if step["model"] is not None:
                step["model"]["perturbation"] = {"dtype": narrow_dtype(scenario), "seed": seed}
        found.append(exact.with_changes(steps=steps))
    return tuple(found)


def narrow_dtype(scenario: Scenario) -> str:
    """The narrowest dtype that the scenario names; bfloat16, which rounds most, before float16; float32 where there is none."""
    named: set[str | None] = set()
    for step in scenario.steps:
        if step.model is not None:
            named.add(step.model.dtype)
            if step.model.quantization is not None:
                named |= {step.model.quantization.compute_dtype, step.model.quantization.quant_state_dtype}
        if step.autocast is not None:
            named.add(step.autocast.dtype)
        named.add(_AMP.get(getattr(step.workload, "mixed_precision", "no")))
    return next((dtype for dtype in ("bfloat16", "float16") if dtype in named), "float32")


def samples_tokens(scenario: Scenario) -> bool:
    """Whether the workload draws tokens, so that two runs part ways by luck."""
    return any(isinstance(step.workload, (Grpo, Generate)) for step in scenario.steps)


def _plain(scenario: Scenario, phase: str | None, step: int | None) -> Iterator[Workload]:
    """Plain passes with the batch of the scenario, which leave out what the failure does not need."""
    stage = scenario.steps[0]
    work = stage.workload
    if not isinstance(work, (*_TRAINERS, Generate)) or stage.compile is not None:
        return
    batch: dict[str, Any] = {"batch_size": work.batch_size, "sequence_length": _length(work)}
    if phase in (None, "forward", "generate"):
        yield _with_workload(scenario, {"kind": "forward", **batch})
    if isinstance(work, Generate):
        return
    if phase in (None, "forward", "backward", "recompute"):
        yield _with_workload(scenario, {"kind": "forward", "backward": True, **batch})
    if step is not None and step <= LONGEST_PLAIN_TRAINING and not isinstance(work, Train):
        training = {key: getattr(work, key) for key in ("learning_rate", "gradient_accumulation", "optimizer")}
        yield _with_workload(scenario, {"kind": "train", "steps": step, **training, **batch})


def _shortened(scenario: Scenario, step: int | None) -> Iterator[Workload]:
    """The same workload with no more steps than it takes to fail."""
    work = scenario.steps[0].workload
    steps = getattr(work, "steps", None)
    if step is not None and steps is not None and step < steps:
        yield _with_workload(scenario, work.model_dump() | {"steps": step})


def _with_workload(scenario: Scenario, workload: dict[str, Any]) -> Workload:
    step = scenario.model_dump()["steps"][0]
    amp = step["workload"].get("mixed_precision", "no")
    if amp != "no" and workload["kind"] in ("forward", "train") and step["autocast"] is None:
        step["autocast"] = {"dtype": _AMP[amp]}
    step["workload"] = workload
    changed = scenario.with_changes(steps=[step])
    return Workload(words=describe(changed), scenario=changed)


def _length(work: Grpo | Sft | Train | Generate) -> int:
    if isinstance(work, Train):
        return work.sequence_length
    return min(work.max_length, _ORDINARY) if isinstance(work, Sft) else _ORDINARY


_ORDINARY = 32


def _describe(work: object) -> str:
    steps = getattr(work, "steps", 0)
    if isinstance(work, Forward):
        both = " forward and backward pass" if work.backward else " forward pass"
        return ("one" if steps == 1 else str(steps)) + both + ("" if steps == 1 else "es")
    if isinstance(work, Generate):
        return f"{steps} × generate"
    name = {"grpo": "GRPO", "sft": "SFT", "train": "plain training"}.get(
        getattr(work, "kind", ""), getattr(work, "kind", "")
    )
    return f"{steps} step{'' if steps == 1 else 's'} of {name}" if steps else str(name)
