"""Each finding is shown by a recorded run, or, where the corpus has no program with it, by a trace built by hand beside one that looks like it."""

import json
from collections.abc import Callable

import pytest
from compilation_examples import launches
from recorded import CONCLUDED, assert_says_what_it_rests_on
from scaling_examples import scaled_use, unscaling
from silent_examples import correction, global_state, indices, overshoots, rounded_sum, unpatched, updates
from traces import TraceBuilder

from dtypedoctor.diagnosis import diagnose, finding_ids

Built = Callable[[], TraceBuilder]
BY_HAND: dict[str, tuple[Built, Built]] = {
    "stale-cuda-stream": (lambda: launches((0, 0x7F10, 42)), lambda: launches((0, 0, 5), (16, 16, 5))),
    "patch-not-applied": (unpatched, lambda: correction(hits=3)),
    "global-state-changed": (global_state, lambda: global_state(by_library=False)),
    "rounded-indices": (indices, TraceBuilder),
    "rounded-sum": (rounded_sum, lambda: updates(lost=32)),
    "scaled-gradients": (scaled_use, unscaling),
    "optimizer-epsilon-underflow": (overshoots, lambda: updates(lost=32)),
}
"""By finding: a trace that has it, and one that has not. The last is also recorded, but not where a step goes too far."""


def test_every_finding_has_a_recording_or_an_example() -> None:
    """A rule without one could fire on anything."""
    runs = json.loads(CONCLUDED.read_text(encoding="utf-8")).values()
    recorded = {finding["id"] for run in runs for finding in run["findings"]}
    assert recorded | set(BY_HAND) == set(finding_ids())


@pytest.mark.parametrize(("finding", "traces"), BY_HAND.items(), ids=list(BY_HAND))
def test_a_finding_is_made_of_what_it_rests_on_and_of_nothing_that_looks_like_it(
    finding: str, traces: tuple[Built, Built]
) -> None:
    """It comes first of all, and the other trace differs in the one thing that matters."""
    fires, silent = (diagnose(build().build()) for build in traces)
    assert fires[0].id == finding
    assert_says_what_it_rests_on(fires[0])
    assert finding not in {found.id for found in silent}
