"""Reduces a set of treatments to a smallest one that keeps a run healthy, given only a test. It knows nothing of processes.

The candidates are treatments: modules to keep in float32, or corrections to switch on. ``test(treated)`` runs with exactly
these treated. :func:`reduce` calls the test itself, one set after the other; :class:`Reduction` hands out the sets, so
that a caller can run several at a time, log each outcome as it arrives, and go on from such a log later.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from dtypedoctor.trials.search import BaselineError, Node, Outcome, Round, Stage, leaves_of, require_usable, search

__all__ = [
    "BaselineError",
    "Disagreement",
    "Interrupted",
    "Node",
    "Options",
    "Outcome",
    "Probe",
    "Reduction",
    "Result",
    "Stage",
    "Test",
    "reduce",
]


Test = Callable[[frozenset[str]], Outcome]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One answer that the search was given.

    Attributes:
        number: probes run so far, this one included; an answer out of the cache does not count.
        treated: ids of the leaves that were treated, and no others.
        cached: the answer was known (from the log, or from earlier in this reduction), nothing was run.
        suspects: ids of the nodes among which a culprit was being looked for when the probe was asked for.
        attempt: 0, or the how-manieth repetition it is.
    """

    number: int
    treated: frozenset[str]
    outcome: Outcome
    cached: bool
    stage: Stage
    suspects: tuple[str, ...]
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a reduction goes about it.

    Attributes:
        width: most sets handed out at a time (at least 1). Above 1 there are fewer rounds and more probes.
        repeat: how often the two key outcomes, nothing treated and the culprits treated, are taken again.
        known: outcomes of earlier runs, in the order in which they were logged. They are believed and not run again; later
            outcomes of the same set stand for its repetitions.
        on_probe: called with each answer, as it is recorded or found in the cache.
    """

    width: int = 1
    repeat: int = 0
    known: Iterable[tuple[frozenset[str], Outcome]] = ()
    on_probe: Callable[[Probe], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """A set whose repeated runs did not end alike, with all its outcomes in order."""

    treated: frozenset[str]
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a reduction found.

    Attributes:
        culprits: ids of the leaves that must be treated for the run to be healthy, most likely first.
        without: for each culprit, the outcome of the probe that treated all the others but not it.
        probes: how many probes were run.
        replayed: how many outcomes were taken from the log instead.
        unresolved: how many of both were unresolved.
        monotone: no passing set was seen to stop passing when more was treated.
        disagreements: sets whose outcome changed when they were run again.
    """

    culprits: tuple[str, ...]
    without: Mapping[str, Outcome]
    probes: int
    replayed: int
    unresolved: int
    monotone: bool
    disagreements: tuple[Disagreement, ...]

    @property
    def one_minimal(self) -> bool:
        """For every culprit a probe showed that leaving out it alone is not healthy."""
        return all(outcome is not Outcome.PASS for outcome in self.without.values())

    @property
    def flaky(self) -> bool:
        """An outcome changed when the same set was run again."""
        return bool(self.disagreements)


class Interrupted(Exception):  # noqa: N818 - an ending that still carries an answer, not an error
    """A reduction ended early, because the test raised or Ctrl-C was pressed; the cause is chained.

    Attributes:
        best: the smallest set known to pass, or None where none is known yet. It need not be 1-minimal.
        probes: how many probes were run.
    """

    def __init__(self, best: frozenset[str] | None, probes: int) -> None:
        reached = "no passing set was known yet" if best is None else f"{len(best)} treated candidates pass"
        super().__init__(f"interrupted after {probes} probes: {reached}")
        self.best = best
        self.probes = probes


class Reduction:
    """A reduction that hands out sets and is told their outcomes.

    Until :meth:`step` returns nothing, run the sets that it returns, in any order or all at once, and :meth:`record` each
    outcome. It is not thread-safe: record from one thread.

    Args:
        roots: the forest of candidates; a flat one for corrections, blocks over submodules over ops for a model.
        options: see :class:`Options`.

    Raises:
        ValueError: the forest is empty, an id occurs twice, a weight or an option is out of range, or a known outcome is
            about leaves that are not in the forest.
    """

    def __init__(self, roots: Sequence[Node], options: Options | None = None) -> None:
        options = options or Options()
        require_usable(roots)
        if options.width < 1 or options.repeat < 0:
            raise ValueError(f"width is {options.width}, it must be at least 1; repeat is {options.repeat}, at least 0")
        self._on_probe = options.on_probe
        self._runs: dict[frozenset[str], list[Outcome]] = {}
        """Every known outcome of a set, in order; the first one is what the search goes by."""
        self._load(options.known, leaves_of(roots))
        self._answers: dict[tuple[frozenset[str], int], Outcome] = {}
        """What the search was told, by set and attempt."""
        self._waiting: dict[frozenset[str], None] = {}
        """Sets of the present round that still need a run; a dict because it keeps their order."""
        self._probes = 0
        self._culprits: tuple[Node, ...] | None = None
        self._search = search(roots, options.width, options.repeat)
        self._round: Round | None = None

    @property
    def probes(self) -> int:
        """How many outcomes were recorded."""
        return self._probes

    @property
    def best(self) -> frozenset[str] | None:
        """The smallest set known to pass whenever it was run, or None."""
        passing = (treated for treated, runs in self._runs.items() if set(runs) == {Outcome.PASS})
        return min(passing, key=len, default=None)

    def step(self) -> tuple[frozenset[str], ...]:
        """The sets that are waiting to be run, all independent of each other; none when the reduction is finished.

        Raises:
            BaselineError: nothing treated does not fail, or everything treated does not pass.
        """
        while not self._waiting and self._culprits is None:
            self._advance()
        return tuple(self._waiting)

    def record(self, treated: frozenset[str], outcome: Outcome) -> None:
        """Takes the outcome of one of the sets that :meth:`step` returned.

        Raises:
            ValueError: the set is not waiting to be run.
        """
        if self._round is None or treated not in self._waiting:
            raise ValueError(f"no outcome is awaited for {sorted(treated)}")
        del self._waiting[treated]
        self._runs.setdefault(treated, []).append(outcome)
        self._probes += 1
        self._answer(self._round, treated, cached=False)

    def result(self) -> Result:
        """What was found.

        Raises:
            RuntimeError: the reduction is not finished.
        """
        if self._culprits is None:
            raise RuntimeError("the reduction is not finished")
        culprits = tuple(leaf.id for leaf in self._culprits)
        return Result(
            culprits=culprits,
            without={culprit: self._runs[frozenset(culprits) - {culprit}][0] for culprit in culprits},
            probes=self._probes,
            replayed=len(self._answers) - self._probes,
            unresolved=sum(outcome is Outcome.UNRESOLVED for outcome in self._answers.values()),
            monotone=_is_monotone({treated: runs[0] for treated, runs in self._runs.items()}),
            disagreements=tuple(
                Disagreement(treated=treated, outcomes=tuple(runs))
                for treated, runs in self._runs.items()
                if len(set(runs)) > 1
            ),
        )

    def _load(self, known: Iterable[tuple[frozenset[str], Outcome]], leaves: frozenset[str]) -> None:
        for treated, outcome in known:
            if strangers := sorted(treated - leaves):
                raise ValueError(f"a known outcome is about {', '.join(strangers)}, not among the candidates")
            self._runs.setdefault(treated, []).append(outcome)

    def _advance(self) -> None:
        """Goes on to the next round, or to the end, with the outcomes of this one."""
        try:
            if self._round is None:
                asked = next(self._search)
            else:
                attempt = self._round.attempt
                asked = self._search.send(tuple(self._runs[treated][attempt] for treated in self._round.sets))
        except StopIteration as stop:
            self._culprits = stop.value
            return
        self._round = asked
        # everything that needs a run waits before the first callback, which may raise
        known = [treated for treated in asked.sets if len(self._runs.get(treated, ())) > asked.attempt]
        self._waiting = {treated: None for treated in asked.sets if treated not in known}
        for treated in known:
            self._answer(asked, treated, cached=True)

    def _answer(self, asked: Round, treated: frozenset[str], *, cached: bool) -> None:
        outcome = self._runs[treated][asked.attempt]
        self._answers[treated, asked.attempt] = outcome
        if self._on_probe is not None:
            self._on_probe(
                Probe(
                    number=self._probes,
                    treated=treated,
                    outcome=outcome,
                    cached=cached,
                    stage=asked.stage,
                    suspects=asked.suspects,
                    attempt=asked.attempt,
                )
            )


def reduce(test: Test, roots: Sequence[Node], options: Options | None = None) -> Result:
    """Finds a 1-minimal set of leaves that passes, calling the test for one set after the other.

    With k culprits that each must be treated, among n equally likely leaves, it needs at most
    k * (ceil(log2(n)) + 2) + 2 probes where the forest is flat and treating more never hurts.

    Args:
        test: runs with exactly these leaves treated.
        roots: the forest of candidates.
        options: see :class:`Options`.

    Raises:
        BaselineError: nothing treated does not fail, or everything treated does not pass.
        Interrupted: the test or ``on_probe`` raised, or Ctrl-C was pressed.
        ValueError: as :class:`Reduction`.
    """
    reduction = Reduction(roots, options)
    try:
        while batch := reduction.step():
            for treated in batch:
                reduction.record(treated, test(treated))
    except BaselineError:
        raise
    except (Exception, KeyboardInterrupt) as error:  # whatever the test raised: what is known by then is not lost
        raise Interrupted(reduction.best, reduction.probes) from error
    return reduction.result()


def _is_monotone(outcomes: Mapping[frozenset[str], Outcome]) -> bool:
    """No passing set is part of a set that does not pass."""
    passing = [treated for treated, outcome in outcomes.items() if outcome is Outcome.PASS]
    others = [treated for treated, outcome in outcomes.items() if outcome is not Outcome.PASS]
    return not any(small < large for small in passing for large in others)
