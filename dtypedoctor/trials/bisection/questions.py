"""Puts a question to the reducer: which of these candidates must be treated for the run to be healthy?"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dtypedoctor.errors import UsageError
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.scenario.request import Request
from dtypedoctor.trials.bisection.bench import Bench
from dtypedoctor.trials.bisection.laboratory import Laboratory
from dtypedoctor.trials.bisection.symptoms import Symptom
from dtypedoctor.trials.candidates import Node
from dtypedoctor.trials.reduction import BaselineError, Options, Probe, Reduction, Result

__all__ = ["Answer", "Measured", "Question", "Watch", "ask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A probe and what it came to.

    Attributes:
        question: which question it belongs to.
        names: what was treated, in the fewest words.
        symptom: what the run came to.
        repeated: it was known from before an interruption.
    """

    question: str
    probe: Probe
    names: tuple[str, ...]
    symptom: Symptom
    repeated: bool


Watch = Callable[[Measured], None]
"""Is told each probe as it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question for the reducer.

    Attributes:
        name: ``modules`` or ``corrections``.
        roots: the candidates.
        scenario: the run with exactly these leaves treated.
        names: what these leaves are called together.
        failure: the failure that is looked for.
    """

    name: str
    roots: tuple[Node, ...]
    scenario: Callable[[frozenset[str]], Scenario]
    names: Callable[[frozenset[str]], tuple[str, ...]]
    failure: Symptom


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


def ask(lab: Laboratory, bench: Bench, question: Question, watch: Watch) -> Answer:
    """Has the reducer's sets run and judged until it is done.

    Ctrl-C does not raise: the answer then holds the best that is known.
    """
    answer = Answer()
    latest: dict[frozenset[str], tuple[Symptom, bool]] = {}

    def tell(probe: Probe) -> None:
        symptom, repeated = latest[probe.treated]
        names = question.names(probe.treated)
        watch(Measured(question=question.name, probe=probe, names=names, symptom=symptom, repeated=repeated))

    reduction = Reduction(question.roots, Options(width=lab.width, repeat=1, on_probe=tell))
    attempts: Counter[frozenset[str]] = Counter()
    try:
        while sets := reduction.step():
            for treated, symptom, repeated in _run(lab, bench, question, sets, attempts):
                latest[treated] = symptom, repeated
                answer.symptoms.setdefault(treated, symptom)
                answer.seconds.append(symptom.seconds)
                reduction.record(treated, symptom.outcome(question.failure))
            attempts.update(sets)
        answer.result = reduction.result()
    except BaselineError as error:
        answer.baseline = error
    except (KeyboardInterrupt, UsageError):  # the latter: no more runs can be made, usually because the disk is full
        answer.interrupted = True
        answer.best = reduction.best
    return answer


def _run(lab: Laboratory, bench: Bench, question: Question, sets: Sequence[frozenset[str]],
         attempts: Mapping[frozenset[str], int]) -> Iterator[tuple[frozenset[str], Symptom, bool]]:  # fmt: skip
    """Runs sets, those of one attempt together, as they end."""
    for attempt in sorted({attempts[treated] for treated in sets}):
        same = [treated for treated in sets if attempts[treated] == attempt]
        requests = [Request(scenario=question.scenario(treated)) for treated in same]
        for done in lab.run_all(requests, attempt=attempt):
            yield same[done.index], bench.judge(done.run), done.repeated
