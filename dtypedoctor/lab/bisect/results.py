"""What a bisection finds, as values."""

from dataclasses import dataclass, field
from enum import StrEnum

from dtypedoctor.examination.results import Treatment, Trial
from dtypedoctor.lab.trials.reduction import BaselineError, Outcome, Result

OWN = "::self"
"""What is appended to a module's dotted name to mean its own arithmetic, without the modules in it."""


class Kind(StrEnum):
    """The families of failures; two runs of one family fail alike."""

    HEALTHY = "healthy"
    NOT_FINITE = "not-finite"
    DTYPE_ERROR = "dtype-error"
    INACCURATE = "inaccurate"
    RAISED = "raised"
    DIED = "died"
    NOT_INSTALLED = "not-installed"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """What one run came to.

    Attributes:
        reason: one sentence without a full stop.
        detail: what tells failures of one family apart: the exception's class, how the process died.
        phase, step, call: where it failed; None where it did not, or where that is unknown.
        fqn: the module that it failed in (``NAME::self`` for its own arithmetic), or that reached the largest share of its
            dtype's range where nothing failed.
        absmax: the largest finite magnitude among the module outputs and gradients in 16-bit dtypes (in any dtype, where
            there are no such).
        share: that over the largest number of its dtype.
        seconds: wall-clock time of the run.
    """

    kind: Kind
    reason: str
    detail: str = ""
    phase: str | None = None
    step: int | None = None
    call: int | None = None
    fqn: str | None = None
    absmax: float | None = None
    share: float | None = None
    seconds: float = 0.0

    @property
    def healthy(self) -> bool:
        """Finite, without a dtype error, and as accurate as it should be."""
        return self.kind is Kind.HEALTHY

    def outcome(self, failure: "Symptom") -> Outcome:
        """What this run says about ``failure``: passes, fails the same way, or fails otherwise."""
        if self.healthy:
            return Outcome.PASS
        same = self.kind is failure.kind and self.detail == failure.detail
        return Outcome.FAIL if same else Outcome.UNRESOLVED


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Compared with the same run untreated; None where one of the two did not live long enough to say.

    Attributes:
        parameter_bytes: how much more the parameters and buffers take.
        memory_bytes: how much more the run took at its peak.
        step_time: median seconds of a step with the modules in float32.
        step_time_ratio: that over the untreated run's.
    """

    parameter_bytes: int
    memory_bytes: int | None
    step_time: float | None
    step_time_ratio: float | None


@dataclass(slots=True)
class Answer:
    """What came out.

    Attributes:
        result: what the reducer found; None where it could not begin or was interrupted.
        baseline: why it could not begin.
        best: the smallest set that was known to pass when it was interrupted; None where it was not, or where none was.
        interrupted: Ctrl-C ended it.
        symptoms: what each set came to when it was first run.
        seconds: time of each probe.
    """

    result: Result | None = None
    baseline: BaselineError | None = None
    best: frozenset[str] | None = None
    interrupted: bool = False
    symptoms: dict[frozenset[str], Symptom] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)

    @property
    def culprits(self) -> tuple[str, ...]:
        """The leaves that must be treated, as far as that is known."""
        if self.result is not None:
            return self.result.culprits
        return tuple(sorted(self.best)) if self.best is not None else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """A reproduction, or the reason why there is none.

    Attributes:
        module: the candidate that it shows.
        script: its file in the run directory; None where there is none.
        bytes: size of the tensors beside it.
        said: what the script said when it was run in a process of its own.
        reason: why there is none.
    """

    module: str
    script: str | None = None
    bytes: int = 0
    said: str = ""
    reason: str = ""


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
        return len(self.probe_seconds)

    @property
    def probe_seconds(self) -> tuple[float, ...]:
        """How long each of them took."""
        return tuple(s for answer in (self.modules, self.corrections) if answer is not None for s in answer.seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What a bisection inside the module of a capsule has found.

    Attributes:
        candidates: parts of the module: modules without others in them, and each other module's own operators.
        runs: how often the call was made.
        parts: the fewest names for ``keep-float32`` with which the call passes; empty where none were found.
        one_minimal: none of the parts can be left out.
        why: why no parts were found, or why there may be fewer; a clause.
        trial: of the parts, in float32.
    """

    candidates: int
    runs: int
    parts: tuple[str, ...] = ()
    one_minimal: bool = False
    why: str = ""
    trial: Trial | None = None
