"""The trace of a long run: bounded, read soon, and honest about what of it was folded."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from dtypedoctor.trace.events import End, Header, Metric, ScalerState, Site
from dtypedoctor.trace.lines import EVENTS
from dtypedoctor.trace.reader import FOLDED, Sizes, detail_files, read_trace
from dtypedoctor.trace.writer import TraceWriter

PLACES, BAD = 5, 3


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("head", 20_000), ("file", 4_000), ("last", 2), ("around_events", 3)):
        monkeypatch.setattr(Sizes, name, value)


def train(directory: Path, steps: int, bad: dict[int, int] | None = None) -> Iterator[int]:
    """Writes a run step by step; in step N of ``bad`` the place ``bad[N]`` is not finite."""
    writer = TraceWriter(directory)
    writer.write(Header())
    for number in range(PLACES):
        writer.write(Site(id=number, root=0, fqn=f"layer.{number}", cls="Linear", phase="forward", kind="output", index="",
                          dtype="float16", shape=[1]))  # fmt: skip
    try:
        for step in range(1, steps + 1):
            for site in range(PLACES):
                inf = int((bad or {}).get(step) == site)
                writer.write_samples(writer.next_n(), step, step, [(site, float(step), 0, inf)])
            writer.write(Metric(n=writer.next_n(), step=step, values={"loss": 1.0 / step}))
            yield step
        writer.write(End(n=writer.next_n(), outcome="completed", steps_completed=steps))
    finally:
        writer.close()


def trained(directory: Path, steps: int, bad: dict[int, int] | None = None) -> Path:
    """A finished run."""
    directory.mkdir(exist_ok=True)
    assert sum(1 for _ in train(directory, steps, bad)) == steps
    return directory


def size_of(directory: Path) -> int:
    """Bytes of all files of a trace."""
    return sum(path.stat().st_size for path in directory.iterdir())


def test_the_first_and_the_last_steps_are_kept_and_the_others_counted(tmp_path: Path) -> None:
    """Nothing is lost without a word: what is not kept is in the totals, and the totals say which steps they are of."""
    trace = read_trace(trained(tmp_path, 2_000))
    folded = trace.folded
    assert trace.damage == ()
    assert folded is not None
    steps = {sample.step for sample in trace.samples}
    assert {1, 2, 1_999, 2_000} <= steps
    assert all(folded.holds((step, step)) != (step in steps) for step in range(1, 2_001))
    assert all(len([s for s in trace.samples if s.step == step]) == PLACES for step in steps)
    for site in range(PLACES):
        kept = [s for s in trace.samples if s.site == site]
        assert folded.sites[site].count + len(kept) == 2_000
        assert folded.sites[site].most == max(step for step in range(1, 2_001) if step not in steps)
    assert folded.metrics["loss"].count + len(trace.all(Metric)) == 2_000
    assert "everything was finite there" in folded.describe()


def test_what_happens_in_the_middle_is_kept_with_what_is_around_it(tmp_path: Path) -> None:
    """The first time that a place is not finite: the step is there as a whole, and steps before and after it."""
    trace = read_trace(trained(tmp_path, 2_000, {1_000: BAD}))
    bad = [sample for sample in trace.samples if not sample.finite]
    assert [(sample.step, sample.site) for sample in bad] == [(1_000, BAD)]
    steps = {sample.step for sample in trace.samples}
    assert {999, 1_000, 1_001} <= steps


def test_what_happens_again_and_again_is_kept_once_and_counted(tmp_path: Path) -> None:
    """A mask that is never finite must not keep every step of the run."""
    always = dict.fromkeys(range(1, 5_001), BAD)
    trace = read_trace(trained(tmp_path, 5_000, always))
    assert trace.folded is not None
    assert trace.folded.sites[BAD].num_inf + sum(sample.num_inf for sample in trace.samples) == 5_000
    assert size_of(tmp_path) < 80_000
    assert "1 place(s) were not finite there" in trace.folded.describe()


def test_a_skipped_step_is_an_event(tmp_path: Path) -> None:
    """What a gradient scaler did is kept where it did it, and counted where that was folded."""
    writer = TraceWriter(tmp_path)
    writer.write(Header())
    for step in range(1, 3_001):
        skipped = step == 1_500
        writer.write(ScalerState(n=writer.next_n(), step=step, scale=2.0, found_inf=skipped, skipped=skipped))
    writer.close()
    trace = read_trace(tmp_path)
    assert [state.step for state in trace.all(ScalerState) if state.skipped] == [1_500]
    assert len(trace.all(ScalerState)) < 2_000


def test_a_kill_between_folding_a_file_and_removing_it_counts_nothing_twice(tmp_path: Path) -> None:
    """The totals name the files that they are of; a file that is still there is passed over."""
    trained(tmp_path, 1_000)
    before = read_trace(tmp_path)
    assert before.folded is not None
    (tmp_path / f"detail-{before.folded.segments[-1]:06d}.jsonl").write_bytes((tmp_path / EVENTS).read_bytes())
    after = read_trace(tmp_path)
    assert after.samples == before.samples


def test_files_that_are_gone_are_missed(tmp_path: Path) -> None:
    """A file of details that somebody has removed, and totals that cannot be read."""
    trained(tmp_path, 1_000)
    *_, before_last, last = (path for path, _ in detail_files(tmp_path).values())
    before_last.unlink()
    assert read_trace(tmp_path).damage == ("1 file(s) of details are missing",)
    last.unlink()
    assert read_trace(tmp_path).damage == ("2 file(s) of details are missing",)
    (tmp_path / FOLDED).write_bytes(b"{}\n")
    assert any("totals of folded steps cannot be read" in sentence for sentence in read_trace(tmp_path).damage)


def test_lines_cut_off_from_the_end_of_a_file_are_missed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At every line boundary of every file of details of a finished run, and of its main file."""
    monkeypatch.setattr(Sizes, "head", 4_000)
    monkeypatch.setattr(Sizes, "file", 2_000)
    trained(tmp_path, 200, {100: BAD})
    files = [path for path, _ in detail_files(tmp_path).values()]
    assert len(files) > Sizes.last + 1  # some of them around the event
    for path in files:
        whole = path.read_bytes()
        lines = whole.splitlines(keepends=True)
        for kept in range(len(lines)):
            path.write_bytes(b"".join(lines[:kept]))
            assert read_trace(tmp_path).damage == (f"{path.name}: {len(lines) - kept} record(s) are missing",)
        path.write_bytes(whole)
    main = tmp_path / EVENTS
    lines = main.read_bytes().splitlines(keepends=True)
    for kept in range(len(lines)):
        main.write_bytes(b"".join(lines[:kept]))
        assert read_trace(tmp_path).end is None


def test_a_folded_trace_says_so_in_its_report(tmp_path: Path) -> None:
    """Coverage names the steps of which only totals are kept."""
    from dtypedoctor.report.files import report_of

    report = report_of(trained(tmp_path, 1_000))
    assert any("single measurements of steps" in line for line in report.coverage)
