"""One workload with everything that judges it: the float32 reference, and how far from it a run may be."""

from dataclasses import dataclass

from dtypedoctor.errors import UsageError
from dtypedoctor.runner.run import Run
from dtypedoctor.scenario.request import Request
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trials.bisection.laboratory import Laboratory
from dtypedoctor.trials.bisection.probes import Workload, perturbed, reference, samples_tokens
from dtypedoctor.trials.bisection.symptoms import Symptom, refused, symptom_of
from dtypedoctor.trials.bisection.tolerance import Tolerance, derive

__all__ = ["Bench", "set_up"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A workload that runs can be judged on.

    Attributes:
        workload: what is run.
        reference: trace of the float32 reference.
        healthy: what the reference itself came to; nothing can be judged where it is not healthy.
        tolerance: how far runs may be from it.
    """

    workload: Workload
    reference: Trace
    healthy: Symptom
    tolerance: Tolerance

    def judge(self, run: Run | UsageError) -> Symptom:
        """What ``run`` came to."""
        return refused(run.message) if isinstance(run, UsageError) else symptom_of(run, self.tolerance)


def set_up(lab: Laboratory, workload: Workload, given: float | None) -> Bench:
    """Runs the reference of ``workload``, and the moved references where no tolerance is given.

    Raises:
        UsageError: the reference cannot be run at all.
    """
    scenario = workload.scenario
    wanted = [reference(scenario), *(() if given is not None else perturbed(scenario))]
    found: dict[int, Run] = {}
    for done in lab.run_all([Request(scenario=one) for one in wanted]):
        if isinstance(done.run, UsageError):
            raise done.run
        found[done.index] = done.run
    exact = found.pop(0)
    moved = [run.trace for run in found.values() if symptom_of(run).healthy]
    return Bench(
        workload=workload,
        reference=exact.trace,
        healthy=symptom_of(exact),
        tolerance=derive(exact.trace, moved, sampled=samples_tokens(scenario), given=given),
    )
