"""What a bisection found."""

from dataclasses import dataclass
from enum import StrEnum

from dtypedoctor.trials.bisection.cost import Cost
from dtypedoctor.trials.bisection.questions import Answer
from dtypedoctor.trials.bisection.reproduction import Reproduction
from dtypedoctor.trials.bisection.symptoms import Symptom
from dtypedoctor.trials.bisection.verdicts import Verdict
from dtypedoctor.trials.results import Trial
from dtypedoctor.trials.treatment import Treatment

__all__ = ["Bisection", "End"]


class End(StrEnum):
    """How a bisection ended."""

    FOUND = "found"
    HEALTHY = "healthy"
    """There is nothing to look for."""
    DOMAIN_ERROR = "domain-error"
    """It fails in float32 as well."""
    ROUNDED_WEIGHTS = "rounded-weights"
    """It fails in float32 as well, but only with the weights as the dtype rounds them."""
    OUTSIDE = "outside"
    """It fails with every module in float32, but not in the float32 reference: no module is to blame."""
    UNRESOLVED = "unresolved"
    """With every module in float32 it fails in another way, so nothing can be said."""
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """Everything that was found out.

    Attributes:
        treatment: the untreated run with its diagnosis.
        failure: what it came to.
        workload: what the probes ran, in a few words; empty where there were none.
        candidates: how many modules, and modules' own arithmetics, there were to choose from.
        kept: the culprits in the fewest names: a module whole where all in it is needed.
        modules, corrections: the two answers; None where the question was not put.
        trials: the whole scenario with the culprits in float32, and with the corrections.
        confirmed: whether the whole scenario is healthy with the culprits in float32.
        offered: the corrections that there were to choose from.
        tolerance: the accepted difference of the first outputs from the reference.
        note: why nothing more could be said, or what is to be known about the answer.
        runs: how many runs there were in all, those known from before an interruption included.
    """

    end: End
    treatment: Treatment
    failure: Symptom
    workload: str = ""
    candidates: int = 0
    kept: tuple[str, ...] = ()
    modules: Answer | None = None
    corrections: Answer | None = None
    trials: tuple[Trial, ...] = ()
    confirmed: bool = False
    offered: tuple[str, ...] = ()
    verdicts: tuple[Verdict, ...] = ()
    cost: Cost | None = None
    reproduction: Reproduction | None = None
    tolerance: float | None = None
    note: str = ""
    runs: int = 0

    @property
    def culprits(self) -> tuple[str, ...]:
        """The modules that must be kept in float32, most likely first."""
        return self.modules.culprits if self.modules is not None else ()

    @property
    def probes(self) -> int:
        """How many sets of treatments were tried, repetitions included."""
        return sum(len(answer.seconds) for answer in (self.modules, self.corrections) if answer is not None)

    @property
    def probe_seconds(self) -> tuple[float, ...]:
        """How long each of them took."""
        return tuple(s for answer in (self.modules, self.corrections) if answer is not None for s in answer.seconds)
