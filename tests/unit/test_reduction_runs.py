"""A reduction can be logged, resumed, interrupted and repeated."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtypedoctor.errors import UsageError
from dtypedoctor.lab.trials.reduction import Interrupted, Node, Options, Outcome, Probe, reduce

NAMES = [f"m{index}" for index in range(64)]
BLOCKS = tuple(
    Node(id=f"block{block}", children=tuple(Node(id=name) for name in NAMES[8 * block : 8 * block + 8]))
    for block in range(8)
)

Log = list[tuple[frozenset[str], Outcome]]

plantings = st.sets(st.sampled_from(NAMES), min_size=1, max_size=4)


class Runs:
    """A test that counts: it passes where the culprits are treated, and fails otherwise with the poison alone treated."""

    def __init__(self, culprits: set[str], poison: str = "m20") -> None:
        self.culprits = culprits
        self.poison = poison
        self.log: Log = []

    def __call__(self, treated: frozenset[str]) -> Outcome:
        if self.poison in treated and len(treated) < 32:
            outcome = Outcome.UNRESOLVED
        else:
            outcome = Outcome.PASS if self.culprits <= treated else Outcome.FAIL
        self.log.append((treated, outcome))
        return outcome


@settings(max_examples=50)
@given(culprits=plantings)
def test_no_set_is_run_twice(culprits: set[str]) -> None:
    """Every outcome is asked for once, and the result counts what was run."""
    runs = Runs(culprits - {"m20"} or {"m1"})
    result = reduce(runs, BLOCKS)
    sets = [treated for treated, _ in runs.log]
    assert len(sets) == len(set(sets)) == result.probes
    assert result.unresolved == sum(outcome is Outcome.UNRESOLVED for _, outcome in runs.log)


@settings(max_examples=30)
@given(culprits=plantings, repeat=st.integers(0, 2))
def test_resuming_from_any_prefix_of_the_log_gives_the_same_answer(culprits: set[str], repeat: int) -> None:
    """What the log holds is not run again, and the rest of the runs are those that were missing."""
    culprits = culprits - {"m20"} or {"m1"}
    whole = Runs(culprits)
    expected = reduce(whole, BLOCKS, Options(repeat=repeat))
    for length in range(len(whole.log) + 1):
        rest = Runs(culprits)
        result = reduce(rest, BLOCKS, Options(repeat=repeat, known=whole.log[:length]))
        assert rest.log == whole.log[length:]
        assert (result.culprits, result.without) == (expected.culprits, expected.without)
        assert result.probes == len(whole.log) - length
        assert (result.unresolved, result.monotone) == (expected.unresolved, expected.monotone)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), UsageError("the disk is full")])
def test_an_interruption_at_any_probe_ends_with_the_best_set_so_far(error: BaseException) -> None:
    """The smallest passing set is carried along with the cause, and the log resumes to the same answer."""
    whole = Runs({"m3", "m40"})
    expected = reduce(whole, BLOCKS)
    for stop in range(len(whole.log)):
        runs = Runs({"m3", "m40"})

        def interrupted(treated: frozenset[str], runs: Runs = runs, stop: int = stop) -> Outcome:
            if len(runs.log) == stop:
                raise error
            return runs(treated)

        with pytest.raises(Interrupted) as caught:
            reduce(interrupted, BLOCKS)
        passing = [treated for treated, outcome in runs.log if outcome is Outcome.PASS]
        assert caught.value.best == min(passing, key=len, default=None)
        assert caught.value.probes == stop
        assert caught.value.__cause__ is error
        assert reduce(Runs({"m3", "m40"}), BLOCKS, Options(known=runs.log)).culprits == expected.culprits


def test_ctrl_c_while_a_probe_is_being_told_is_an_interruption_too() -> None:
    """The outcome that had just arrived still counts towards the best set."""

    def press(probe: Probe) -> None:
        if probe.treated:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted, match="after 2 probes: 64 treated candidates pass") as caught:
        reduce(Runs({"m3"}), BLOCKS, Options(on_probe=press))
    assert caught.value.best == frozenset(NAMES)


class Changing:
    """Passes with the culprit treated, but the n-th run of one set (from 0) ends otherwise."""

    def __init__(self, changing: frozenset[str], run: int, outcome: Outcome) -> None:
        self.changing, self.run, self.outcome = changing, run, outcome
        self.log: Log = []

    def __call__(self, treated: frozenset[str]) -> Outcome:
        earlier = sum(known == treated for known, _ in self.log)
        outcome = Outcome.PASS if "m5" in treated else Outcome.FAIL
        if treated == self.changing and earlier == self.run:
            outcome = self.outcome
        self.log.append((treated, outcome))
        return outcome


@pytest.mark.parametrize(
    ("changing", "outcomes"),
    [
        (frozenset(), (Outcome.FAIL, Outcome.FAIL, Outcome.PASS)),
        (frozenset(["m5"]), (Outcome.PASS, Outcome.PASS, Outcome.FAIL)),
    ],
)
def test_a_key_outcome_that_changes_when_repeated_is_reported_as_flaky(
    changing: frozenset[str], outcomes: tuple[Outcome, ...]
) -> None:
    """The untreated run and the culprits' run are repeated, and what disagreed is said, also after a resume."""
    runs = Changing(changing, 2, outcomes[2])
    first = reduce(runs, BLOCKS, Options(repeat=2))
    resumed = reduce(Changing(changing, 2, outcomes[2]), BLOCKS, Options(repeat=2, known=runs.log))
    for result in (first, resumed):
        assert result.culprits == ("m5",)
        assert result.flaky
        assert [(entry.treated, entry.outcomes) for entry in result.disagreements] == [(changing, outcomes)]
    assert resumed.probes == 0
