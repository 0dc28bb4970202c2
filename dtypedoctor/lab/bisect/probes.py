"""Scenarios derived from the one under bisection.

Cheaper workloads, runs with some modules in float32, the float32 reference, and the modes that the verdict table compares.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dtypedoctor.lab.bisect.results import OWN
from dtypedoctor.lab.scenarios.model import Forward, Generate, Grpo, Request, Scenario, Sft, Train
from dtypedoctor.lab.trials.changes import with_model

KEEP = "keep-float32"

SEEDS = (1, 2)
"""Of the moved weights; the tolerance is taken from the run that they change most."""

LONGEST_PLAIN_TRAINING = 4
"""Steps up to which a plain training loop is worth trying in the place of a trainer."""

_TRAINERS = (Grpo, Sft, Train)
_HALF = ("float16", "bfloat16")
_ORDINARY = 32
"""Tokens of a sequence where the workload does not say."""

MANY_LAYERS = 12
"""Of so many layers each is compiled by itself, once for all that are alike; the time that the whole model takes grows with their number."""

_OTHER = {"float16": "bfloat16", "bfloat16": "float16"}
_AMP = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Layers:
    """A row of modules that only a number tells apart.

    Attributes:
        parent: dotted name of what holds them.
        number: of those that were called.
    """

    parent: str
    number: int

    def lie_in(self, culprits: Sequence[str]) -> bool:
        """Whether the own arithmetic of a module around them is a culprit: its code, and what that calls, stays out of compiled code."""
        around = [culprit.removesuffix(OWN) for culprit in culprits if culprit.endswith(OWN)]
        return any(not name or f"{self.parent}.".startswith(f"{name}.") for name in around)


def probe_of(scenario: Scenario) -> Request:
    """The run that answers a question of the search: where it fails and how near it comes, without a look at what stays finite."""
    return Request(scenario=scenario, look_steps=0)


def cheaper(scenario: Scenario, phase: str | None, step: int | None) -> tuple[Scenario, ...]:
    """What may show the same failure in less time, cheapest first; the scenario itself is last.

    Args:
        scenario: the one under bisection.
        phase, step: where it fails; None where that is not known.
    """
    if len(scenario.steps) > 1:
        return (scenario,)
    ladder = [*_plain(scenario, phase, step), *_shortened(scenario, step), scenario]
    return tuple(one for number, one in enumerate(ladder) if one not in ladder[:number])


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
    return with_model(dtype="float32")(reference(scenario))


def perturbed(scenario: Scenario) -> tuple[Scenario, ...]:
    """The reference with every weight and gradient moved by one unit in the last place of the scenario's narrowest dtype, several times."""
    dtype, exact = narrow_dtype(scenario), reference(scenario)
    return tuple(with_model(perturbation={"dtype": dtype, "seed": seed})(exact) for seed in SEEDS)


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


def _plain(scenario: Scenario, phase: str | None, step: int | None) -> Iterator[Scenario]:
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


def _shortened(scenario: Scenario, step: int | None) -> Iterator[Scenario]:
    """The same workload with no more steps than it takes to fail."""
    work = scenario.steps[0].workload
    steps = getattr(work, "steps", None)
    if step is not None and steps is not None and step < steps:
        yield _with_workload(scenario, work.model_dump() | {"steps": step})


def _with_workload(scenario: Scenario, workload: dict[str, Any]) -> Scenario:
    step = scenario.model_dump()["steps"][0]
    amp = step["workload"].get("mixed_precision", "no")
    if amp != "no" and workload["kind"] in ("forward", "train") and step["autocast"] is None:
        step["autocast"] = {"dtype": _AMP[amp]}
    step["workload"] = workload
    return scenario.with_changes(steps=[step])


def _length(work: Grpo | Sft | Train | Generate) -> int:
    if isinstance(work, Train):
        return work.sequence_length
    return min(work.max_length, _ORDINARY) if isinstance(work, Sft) else _ORDINARY


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """A way of running.

    Attributes:
        name: what is different.
        scenario: the whole of it.
    """

    name: str
    scenario: Scenario


def modes(
    base: Scenario, ladder: Sequence[Scenario], culprits: Sequence[str] = (), *, layers: "Layers | None" = None
) -> tuple[Mode, ...]:
    """The modes that are worth running for a scenario.

    Args:
        base: the workload that shows the failure; attention, autocast, dtype and compiler are changed on it.
        ladder: the workloads from cheap to whole, which separate forward, backward and optimizer.
        culprits: what must be kept in float32. With these kept, a backward pass that fails fails for a reason of its own.
        layers: those that the model has in a row; of many each is compiled by itself.
    """
    both = _forward_and_backward(ladder)
    passes = ladder if both is None else sorted((*ladder, both), key=_rank)
    table = [Mode(name=describe(workload), scenario=workload) for workload in passes]
    if len(base.steps) == 1 and base.steps[0].model is not None:
        table += _changed_modes(base, passes)
        if culprits:
            table.append(Mode(name="culprits in float32", scenario=with_kept(both or base, culprits)))
        table += _compiled_modes(base, both or base, culprits, layers)
    scenarios = [mode.scenario for mode in table]
    return tuple(mode for number, mode in enumerate(table) if mode.scenario not in scenarios[:number])


def _changed_modes(scenario: Scenario, ladder: Sequence[Scenario]) -> Iterator[Mode]:
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


def _compiled_modes(
    scenario: Scenario, both: Scenario, culprits: Sequence[str], layers: "Layers | None"
) -> Iterator[Mode]:
    """Inductor's code for the failing pass; and whether a compiled backward pass fails where the culprits cannot.

    The second needs no generated code: ``aot_eager`` traces and splits the backward pass as inductor does, and runs it with
    torch's own kernels, in a sixth of the time. Where what calls the layers is a culprit itself there would be nothing left to compile.
    A module that is kept breaks the graph, after which Dynamo begins again with each function around it, so there layers are compiled by themselves however few they are.
    """
    stage = scenario.steps[0]
    by_layer = layers is not None and layers.number >= MANY_LAYERS
    regions, how = ("layers", ", layer by layer") if by_layer else ("model", "")
    if stage.compile is not None:
        yield Mode(name="not compiled", scenario=_with(scenario, compile=None))
    elif not isinstance(stage.workload, Generate):
        inductor = {"backend": "inductor", "regions": regions}
        yield Mode(name=f"compiled (inductor{how})", scenario=_with(scenario, compile=inductor))
        if culprits and not (layers is not None and layers.lie_in(culprits)):
            kept = with_kept(both, culprits)
            regions, how = ("layers", ", layer by layer") if layers is not None else ("model", "")
            name = f"compiled (aot_eager{how}), culprits in float32"
            yield Mode(name=name, scenario=_with(kept, compile={"backend": "aot_eager", "regions": regions}))


def _forward_and_backward(ladder: Sequence[Scenario]) -> Scenario | None:
    """The plain pass of a ladder with its backward pass; None for a scenario that only generates, or that has no plain pass."""
    if isinstance(ladder[-1].steps[-1].workload, Generate):
        return None
    for workload in ladder:
        work = workload.steps[0].workload
        if isinstance(work, Forward) and len(workload.steps) == 1:
            return _with(workload, workload=work.model_dump() | {"backward": True})
    return None


def _rank(workload: Scenario) -> int:
    """Forward passes, then those with a backward pass, then everything else as it was."""
    if not isinstance(workload.steps[0].workload, Forward):
        return 2
    return int(_has_backward(workload))


def _training_modes(ladder: Sequence[Scenario]) -> Iterator[Mode]:
    """Modes that need gradients, each on the cheapest workload that can have it."""
    training = next((workload for workload in ladder if _has_backward(workload)), None)
    if training is not None and (model := training.steps[0].model) is not None:
        name = "without gradient checkpointing" if model.gradient_checkpointing else "gradient checkpointing"
        changed = _with(training, model={"gradient_checkpointing": not model.gradient_checkpointing})
        yield Mode(name=name, scenario=changed)
    loop = next((workload for workload in ladder if isinstance(workload.steps[0].workload, Train)), None)
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
