"""What is measured on one workload beside the search: its float32 reference, the verdict table of modes, the cost of a fix."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from statistics import median
from typing import TYPE_CHECKING, Any

from dtypedoctor.dtypes import DTYPES
from dtypedoctor.errors import UsageError
from dtypedoctor.runner.run import Run
from dtypedoctor.scenario.model import Forward, Grpo, Scenario, Sft, Train
from dtypedoctor.trace.events import Metric, ParameterNote, Resources
from dtypedoctor.trace.model import Trace
from dtypedoctor.trials.bisection.probes import (
    Mode,
    describe,
    perturbed,
    probe_of,
    reference,
    samples_tokens,
    with_kept,
)
from dtypedoctor.trials.bisection.results import Cost, Kind, Symptom, Verdict
from dtypedoctor.trials.bisection.symptoms import Tolerance, derive, refused, symptom_of

if TYPE_CHECKING:
    from dtypedoctor.trials.bisection.probe_runner import ProbeRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSetup:
    """A workload that runs can be judged on.

    Attributes:
        workload: what is run.
        reference: trace of the float32 reference.
        healthy: what the reference itself came to; nothing can be judged where it is not healthy.
        tolerance: how far runs may be from it.
    """

    workload: Scenario
    reference: Trace
    healthy: Symptom
    tolerance: Tolerance

    def judge(self, run: Run | UsageError) -> Symptom:
        """What ``run`` came to."""
        return refused(run.message) if isinstance(run, UsageError) else symptom_of(run, self.tolerance)


def set_up(runner: "ProbeRunner", workload: Scenario, given: float | None) -> ReferenceSetup:
    """Runs the reference of ``workload``, and the moved references where no tolerance is given.

    Raises:
        UsageError: the reference cannot be run at all.
    """
    exact = runner.run(probe_of(reference(workload)))
    others = [runner.run(probe_of(one)) for one in (() if given is not None else perturbed(workload))]
    moved = [run for run in others if symptom_of(run).healthy]
    return ReferenceSetup(
        workload=workload,
        reference=exact.trace,
        healthy=symptom_of(exact),
        tolerance=derive(exact, moved, sampled=samples_tokens(workload), given=given),
    )


OUTERMOST = ""
"""Dotted name of the model itself."""


def measure(
    runner: "ProbeRunner", setup: ReferenceSetup, wanted: Sequence[Mode], failure: Symptom
) -> tuple[Verdict, ...]:
    """Runs every mode.

    Finiteness and exceptions decide. How exact a mode is, is asked only where that is what failed.
    """
    verdicts: dict[str, Verdict] = {}
    for mode in sorted(wanted, key=_needs_own_process):  # so that the model is loaded once for the others
        run = runner.ask(probe_of(mode.scenario)).run
        if isinstance(run, UsageError):
            continue  # what the model cannot do is no verdict about it
        symptom = _as_far_as_seen(symptom_of(run, _tolerance(setup, mode, failure)), mode)
        verdicts[mode.name] = Verdict(
            mode=mode.name, workload=describe(mode.scenario), outcome=symptom.outcome(failure), symptom=symptom
        )
    return tuple(verdicts[mode.name] for mode in wanted if mode.name in verdicts)


def _needs_own_process(mode: Mode) -> bool:
    """Whether a mode changes more of its process than the model: trainers and the compiler do."""
    return any(step.compile is not None or isinstance(step.workload, (Grpo, Sft)) for step in mode.scenario.steps)


def _tolerance(setup: ReferenceSetup, mode: Mode, failure: Symptom) -> Tolerance | None:
    """What is accepted of a mode's run; of another workload only the outputs before any training can be compared."""
    if failure.kind is not Kind.INACCURATE:
        return None
    same = _work(mode.scenario) == _work(setup.workload)
    return setup.tolerance if same else setup.tolerance.of_first_outputs()


def _work(scenario: Scenario) -> list[dict[str, Any]]:
    """What is done with the models, however many steps of it."""
    return [step.workload.model_dump(exclude={"steps"}) for step in scenario.steps]


def _as_far_as_seen(symptom: Symptom, mode: Mode) -> Symptom:
    """Inside compiled code nothing is watched: what it returns stands for all of it, under the name of the model or layer that was compiled.

    Modules that stay out of it, as those that are kept in float32 do, are watched, and may be what comes nearest to the end of
    its dtype's range; but where it fails they may only have been given what was inf or NaN.
    """
    if all(step.compile is None for step in mode.scenario.steps):
        return symptom
    seen = replace(symptom, absmax=symptom.absmax or None)  # of nothing but NaN it is 0
    if symptom.kind is not Kind.NOT_FINITE:
        return seen
    where = f", step {symptom.step} ({symptom.phase})" if symptom.phase else ""
    reason = f"inf or NaN in what the compiled code returns{where}"
    by_layer = any(step.compile is not None and step.compile.regions == "layers" for step in mode.scenario.steps)
    return replace(seen, fqn=_layer_of(seen.fqn) if by_layer else OUTERMOST, reason=reason)


def _layer_of(fqn: str | None) -> str:
    """The outermost numbered module that ``fqn`` is or lies in; else ``fqn`` itself."""
    parts = (fqn or OUTERMOST).removesuffix("::self").split(".")
    numbered = next((position for position, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: numbered + 1])


STEPS = 6
"""Of a workload whose steps are cheap; the first one, which warms up, does not count."""


def measure_cost(runner: "ProbeRunner", workload: Scenario, modules: Sequence[str]) -> Cost | None:
    """Runs ``workload`` untreated and with ``modules`` in float32, one after the other; None where that is not possible."""
    scenario = _longer(workload)
    try:
        plain = runner.run(probe_of(scenario), "cost-untreated").trace
        kept = runner.run(probe_of(with_kept(scenario, modules)), "cost-kept").trace
    except UsageError:
        return None
    times = _step_time(plain), _step_time(kept)
    peaks = plain.last(Resources), kept.last(Resources)
    return Cost(
        parameter_bytes=_parameter_bytes(kept) - _parameter_bytes(plain),
        memory_bytes=peaks[1].peak_memory - peaks[0].peak_memory if peaks[0] and peaks[1] else None,
        step_time=times[1],
        step_time_ratio=times[1] / times[0] if times[0] and times[1] else None,
    )


def _longer(scenario: Scenario) -> Scenario:
    steps = scenario.model_dump()["steps"]
    if len(steps) == 1 and isinstance(scenario.steps[0].workload, (Forward, Train)):
        steps[0]["workload"]["steps"] = STEPS
    return scenario.with_changes(steps=steps)


def _step_time(trace: Trace) -> float | None:
    times = [m.values["step_time"] for m in trace.all(Metric) if "step_time" in m.values]
    return median(times[1:]) if len(times) > 1 else None


def _parameter_bytes(trace: Trace) -> int:
    """Bytes of all parameters and buffers as they were first noted."""
    notes: dict[tuple[int, str], ParameterNote] = {}
    for note in trace.all(ParameterNote):
        notes.setdefault((note.root, note.name), note)
    return sum(prod(note.shape) * DTYPES[note.dtype].bits // 8 for note in notes.values() if note.dtype in DTYPES)
