"""What the traces of several ranks say together, and where they lie."""

import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from traces import TraceBuilder

from dtypedoctor.analysis import ended_at
from dtypedoctor.diagnosis.distributed import Rank, across_ranks, carrier, coverage_of, leading_rank, not_recorded
from dtypedoctor.diagnosis.rule import Confidence, Finding, Severity
from dtypedoctor.examination.processes import Leading
from dtypedoctor.runner.process import collect_rank, exit_of_rank
from dtypedoctor.runner.run import Run, WorkerExit
from dtypedoctor.trace.events import Header, Observation, Raised
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.ranks import (
    BEGUN,
    JOB,
    STATES,
    Member,
    header,
    lead,
    leading_directory,
    member,
    member_of_torchrun,
    rank_directories,
    rank_directory,
)
from dtypedoctor.worker import hooked

FOUND = Finding(id="float16-overflow", severity=Severity.ERROR, confidence=Confidence.LIKELY, summary="s", cause="c")


def step(
    story: TraceBuilder, number: int, *, bad: str = "", sent_inf: int = 0, back_inf: int = 0, op: str = "all_reduce"
) -> None:
    """One training step of one rank: a module, one collective, and the gradients that the optimizer gets."""
    story.sample("module.up", 1.0, inf=int(bad == "forward"), step=number, call=number)
    collective = {"phase": "backward", "step": number, "call": number, "cls": op, "index": "0:0"}
    story.sample("", 1.0, kind="sent", inf=sent_inf, **collective)
    story.sample("", 1.0, kind="received", inf=back_inf, **collective)
    story.sample("module.up.weight", 1.0, kind="grad", phase="backward", inf=back_inf, step=number, call=number)


def rank(number: int, story: TraceBuilder | Trace, *, code: int = 0, stopped: bool = False) -> Rank:
    trace = story.build() if isinstance(story, TraceBuilder) else story
    return Rank(number=number, trace=trace, code=code, ended="completed", stopped=stopped)


def two(**second: object) -> tuple[Rank, Rank]:
    """Two ranks whose second step goes wrong on rank 1, as ``second`` says, and is carried to rank 0."""
    healthy, faulty = TraceBuilder(), TraceBuilder()
    group = Observation(
        n=0, step=1, call=0, phase="forward", kind="process-group", values={"name": "0", "ranks": [0, 1]}
    )
    for story in (healthy, faulty):
        story.add(group)
        step(story, 1)
    step(healthy, 2, back_inf=3)
    step(faulty, 2, **{"bad": "forward", "sent_inf": 3, "back_inf": 3} | second)  # type: ignore[arg-type]
    return rank(0, healthy), rank(1, faulty)


def test_the_rank_that_has_something_bad_before_a_collective_leads() -> None:
    """Rank 0 has it as well, but only from the all_reduce on."""
    assert leading_rank(two()) == 1


def test_of_processes_that_a_script_spawns_the_one_that_sent_it_leads() -> None:
    """Both have a finding; what the first has came out of the all_reduce."""
    one, other = (
        Run(
            trace=one.trace,
            exit=WorkerExit(code=0, timed_out=False, seconds=1.0),
            directory=Path("nowhere"),
            foreign=True,
        )
        for one in two()
    )
    script = replace(one, trace=TraceBuilder().build(), children={1: one, 2: other})
    assert Leading()(script).spawned == 2


def test_the_collective_that_carried_it_is_named_with_its_victims() -> None:
    """The first one after the failure began whose operand is bad here, finite there, and whose result is bad there."""
    ranks = two()
    carried = carrier(ranks, 1)
    assert carried is not None
    assert (carried.site.cls, carried.sent.step, carried.victims, carried.group) == ("all_reduce", 2, (0,), (0, 1))
    told = across_ranks([FOUND], ranks, 1)[0].evidence
    assert told[0] == "Rank 1 of 2 was the first with something that is not finite: step 2, forward, module.up."
    assert told[1].startswith(
        "The all_reduce in the backward pass of step 2 (float16, [2, 8], among ranks 0, 1) carried"
    )


def test_what_no_collective_has_carried_is_told_so() -> None:
    """Rank 1 alone is bad, and what it puts into the collective is finite."""
    ranks = two(sent_inf=0, back_inf=1)
    alone = (rank(0, _healthy()), ranks[1])
    assert carrier(alone, 1) is None
    assert (
        across_ranks([FOUND], alone, 1)[0].evidence[1]
        == "No recorded collective or message propagated it to another rank."
    )


def test_a_broadcast_is_no_tick_of_the_clock() -> None:
    """One rank alone sends something in it, so that it would seem to be ahead of the others."""
    first, second = TraceBuilder(), TraceBuilder()
    first.sample("", 1.0, kind="sent", cls="broadcast", index="0:0")
    for story in (first, second):
        step(story, 1)
    assert rank(0, first).entered() == rank(1, second).entered() == 1


def _healthy(steps: int = 2) -> TraceBuilder:
    story = TraceBuilder()
    for number in range(1, steps + 1):
        step(story, number)
    return story


def _raising(message: str) -> Trace:
    raised = Raised(n=99, step=2, call=2, phase="backward", type="RuntimeError", message=message, frames=[], modules=[])
    return _healthy().add(raised).build(outcome="raised")


@pytest.mark.parametrize(
    ("others", "code", "trace"),
    [
        ("killed before raised", -signal.SIGKILL, None),
        ("raised before lost connections", 1, _raising("CUDA out of memory")),
    ],
)
def test_the_rank_that_brought_the_others_down_leads(others: str, code: int, trace: Trace | None) -> None:
    """What the ranks that are left complain of, and that torchrun stops them, is a consequence."""
    complains = rank(0, _raising("Connection closed by peer [127.0.0.1]:9377"), code=1)
    stopped = rank(1, _healthy(), code=-signal.SIGTERM)
    guilty = rank(2, trace if trace is not None else _healthy(), code=code)
    assert leading_rank([complains, stopped, guilty]) == 2, others


def test_of_ranks_that_hang_the_one_that_is_behind_leads() -> None:
    """The others wait for it in a collective that it never enters."""
    waiting, behind = rank(0, _healthy(3), stopped=True), rank(1, _healthy(2), stopped=True)
    assert leading_rank([waiting, behind]) == 1
    told = list(coverage_of([waiting, behind]))
    assert "entered 3 collective(s)" in told[0]
    assert told[0].endswith("collective(s)")
    assert told[1].endswith("it entered 2 collective(s) and never entered the next one, in which others wait")


def test_a_loss_that_no_module_returned_is_not_called_by_the_name_of_its_model() -> None:
    """The model's output is finite; what the program computes from it is not."""
    faulty = _healthy(1).sample("0", 1.0, kind="loss", cls="", inf=1, step=2, call=2)
    evidence = across_ranks([FOUND], [rank(0, _healthy()), rank(1, faulty)], 1)[0].evidence
    assert evidence[0] == "Rank 1 of 2 was the first with something that is not finite: step 2, forward, the loss."


def of_many(ranks: Sequence[Rank], size: int) -> list[Rank]:
    """The ranks as they are recorded in a job of so many processes."""
    first = Header(created=0.0, pid=1, world_size=size)
    return [replace(one, trace=replace(one.trace, records=(first, *one.trace.records[1:]))) for one in ranks]


@pytest.mark.parametrize(
    ("seen", "size", "missing"),
    [
        ([0, 1], 2, ""),
        ([0], 2, "rank 1"),
        ([1], 3, "ranks 0, 2"),
        ([3, 4], 10**12, "ranks 0-2, 5-999999999999"),
    ],
)
def test_ranks_that_left_nothing_here_are_named(seen: list[int], size: int, missing: str) -> None:
    """However many they are: the number stands in a file that may be anybody's."""
    ranks = of_many([rank(number, _healthy()) for number in seen], size)
    assert not_recorded(ranks) == missing
    assert [line.partition(":")[0] for line in coverage_of(ranks)] == [missing] * bool(missing)


def test_what_came_from_a_rank_that_was_not_recorded_is_not_said_to_begin_here() -> None:
    """Rank 0 of two has it from the all_reduce: the finding says so, and is no more than possible; of rank 1 nothing is said."""
    carried, origin = of_many(two(), 2)
    proven = replace(FOUND, confidence=Confidence.PROVEN)
    alone = across_ranks([proven], [carried], 0)[0]
    assert (
        alone.summary == "s Rank 0 received it through all_reduce: it began on another rank; not recorded here: rank 1."
    )
    assert alone.confidence is Confidence.POSSIBLE
    assert "Rank 0 of 1 recorded here was the first" in alone.evidence[0]
    for ranks, leading in (([origin], 1), ([carried, origin], 1)):
        assert across_ranks([proven], ranks, leading)[0].summary == "s"
        assert across_ranks([proven], ranks, leading)[0].confidence is Confidence.PROVEN


def test_a_rank_of_which_nobody_knows_the_end_leads_those_that_complain_of_it() -> None:
    """It was killed with its machine; one that raised an exception of its own says more."""
    complains = rank(0, _raising("Connection closed by peer [127.0.0.1]:9377"), code=1)
    lost = replace(rank(1, _healthy()), lost=True)
    assert leading_rank([complains, lost]) == 1
    assert leading_rank([complains, lost, rank(2, _raising("bad shard"), code=1)]) == 2


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "0"},
        {"RANK": "x", "WORLD_SIZE": "2"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"},
    ],
)
def test_incomplete_rank_variables_mean_one_process(environment: dict[str, str]) -> None:
    """Half of the variables, or nonsense in them, is no job; nor is Slurm's batch script, which has no step, or a single process of srun."""
    assert member(environment) is None


@pytest.mark.parametrize(
    "launched",
    [
        {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"},
        {"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"},
        {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        {"PMI_RANK": "3", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"},
    ],
)
def test_every_launcher_says_which_process_this_is(launched: dict[str, str]) -> None:
    """torchrun's word goes before that of Slurm, which has started torchrun."""
    assert member(launched) == Member(rank=3, world_size=8, local_rank=1)
    machine = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    torchs = member_of_torchrun(machine | launched)
    assert torchs == (member(launched) if "RANK" in launched else None)


def test_a_rank_knows_its_number_and_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first record of its trace says so."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_RANK", "1")
    here = member()
    assert here is not None
    assert (here.rank, here.world_size, here.local_rank) == (3, 8, 1)
    assert (header().rank, header().world_size) == (3, 8)


def test_the_leading_rank_is_linked_and_can_be_replaced(tmp_path: Path) -> None:
    """Without the link the first rank leads; a run of one process leads itself."""
    assert leading_directory(tmp_path) == tmp_path
    for number in (10, 2, 0):
        rank_directory(tmp_path, number).mkdir()
    (tmp_path / "rank-old").mkdir()
    assert list(rank_directories(tmp_path)) == [0, 2, 10]
    assert leading_directory(tmp_path).name == "rank-0"
    lead(tmp_path, 2)
    lead(tmp_path, 10)
    assert leading_directory(tmp_path).name == "rank-10"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("bad shard", "ValueError at train.py:7 in step 2 (backward): bad shard"),
        (
            "[/w/pair.cc:553] Connection closed by peer [127.0.0.1]:5. Check the logs.",
            "ValueError at train.py:7, because another rank had ended: Connection closed by peer [127.0.0.1]:5",
        ),
    ],
)
def test_an_exception_of_a_rank_is_told_with_the_programs_own_line(message: str, said: str) -> None:
    """Not with that of the library which it has called; one that another rank's end has led to is told as such."""
    frames = ["/home/a/train.py:7 main", "/v/lib/python3.11/site-packages/accelerate/operations.py:9 gather"]
    raised = Raised(
        n=99, step=2, call=2, phase="backward", type="ValueError", message=message, frames=frames, modules=[]
    )
    run = Run(
        trace=_healthy().add(raised).build(outcome="raised"),
        exit=WorkerExit(code=1, timed_out=False, seconds=1.0),
        directory=Path("nowhere"),
    )
    assert ended_at(run) == said


def test_a_rank_that_torchrun_does_not_list_beside_one_that_failed_was_ended_by_it(tmp_path: Path) -> None:
    """torchrun ends the others at once, and lists only those whose end it has seen by then."""
    rank_directory(tmp_path, 0).mkdir(parents=True)
    ended = WorkerExit(code=1, timed_out=False, seconds=1.0)
    run = collect_rank(rank_directory(tmp_path, 0), 0, exit_of_rank(0, ended, {1: {"code": 1, "time": 0.0}}))
    assert (run.exit.code, run.exit.ended_by_launcher) == (-signal.SIGTERM, signal.SIGTERM)


def test_the_hook_names_the_folder_of_a_run_as_everybody_does() -> None:
    """It cannot import the names: a process without torch is to have no more of this package than the hook."""
    assert (hooked.JOB, hooked.BEGUN, hooked.STATES) == (JOB, BEGUN, STATES)
