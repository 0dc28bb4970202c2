"""The trace on disk: written line by line, read back whole or torn."""

import json
from pathlib import Path

import pytest
from sealed import sealed

from dtypedoctor.errors import UsageError
from dtypedoctor.trace.events import (
    KINDS,
    SCHEMA,
    End,
    Environment,
    Header,
    Metric,
    Op,
    Raised,
    Replay,
    Sample,
    Site,
    TensorNote,
)
from dtypedoctor.trace.lines import EVENTS
from dtypedoctor.trace.reader import read_trace
from dtypedoctor.trace.writer import TraceWriter


def write_example(directory: Path) -> None:
    """A trace with one record of the kinds that matter and two lines of samples, one of them late."""
    writer = TraceWriter(directory)
    writer.write(Header(created=1.5, pid=7))
    writer.write(Environment(values={"versions": {"torch": "2.13.0"}}))
    writer.write(site(1, "model.layers.0.mlp"))
    early = writer.next_n(2)
    late = writer.next_n(1)
    writer.write_samples(late, 2, 5, [(1, 65504.0, 0, 3)])
    writer.write_samples(early, 1, 4, [(1, 1.25, 0, 0), (1, 0.5, 2, 0)])
    operand = TensorNote(id=3, dtype="float16", shape=[2, 4], absmax=318.75)
    writer.write(Op(n=writer.next_n(), step=2, call=5, phase="forward", fqn="model.layers.0.mlp", op="aten.mul.Tensor",
                    inputs=[operand], outputs=[], source="model.py:3"))  # fmt: skip
    writer.write(Replay(n=writer.next_n(), of=3, how="float32", finite=True, absmax=77178.0))
    writer.write(Metric(n=writer.next_n(), step=1, values={"loss": 0.25}, nonfinite=["grad_norm"]))
    writer.write(Raised(n=writer.next_n(), step=2, call=5, phase="generate", type="RuntimeError", message="no",
                        frames=["a.py:1 f"], modules=["", "model"]))  # fmt: skip
    writer.mark(2, 5, 1)
    writer.write(End(n=writer.next_n(), outcome="raised", steps_completed=1))
    writer.close()


def site(number: int, fqn: str) -> Site:
    """A place in the forward pass."""
    return Site(
        id=number, root=0, fqn=fqn, cls="MLP", phase="forward", kind="output", index="", dtype="float16", shape=[2]
    )


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """Records keep their values, samples come in the order in which they were measured, the cursor names the module."""
    write_example(tmp_path)
    trace = read_trace(tmp_path)
    assert trace.damage == ()
    assert [s.absmax for s in trace.samples] == [1.25, 0.5, 65504.0]
    assert [(s.num_nan, s.num_inf) for s in trace.samples] == [(0, 0), (2, 0), (0, 3)]
    assert trace.samples[1] == Sample(n=1, step=1, call=4, site=1, absmax=0.5, num_nan=2)
    (op,) = trace.all(Op)
    assert op.inputs[0].absmax == 318.75
    assert op.outputs == []
    assert trace.environment == {"versions": {"torch": "2.13.0"}}
    assert trace.end is not None
    assert trace.end.outcome == "raised"
    assert trace.cursor is not None
    assert trace.cursor.site == site(1, "model.layers.0.mlp")


def test_a_trace_cut_anywhere_reads_as_a_prefix(tmp_path: Path) -> None:
    """Whatever byte a kill cuts the file at, every whole record before it is read and nothing is called damaged."""
    write_example(tmp_path)
    data = (tmp_path / EVENTS).read_bytes()
    whole = read_trace(tmp_path)
    for length in range(len(data)):
        (tmp_path / EVENTS).write_bytes(data[:length])
        part = read_trace(tmp_path)
        assert part.damage == ()
        assert part.records == whole.records[: len(part.records)]
        assert len(part.samples) <= len(whole.samples)
        assert part.end is None


def test_a_newer_schema_is_refused_with_advice(tmp_path: Path) -> None:
    """A trace of a later version is not guessed at."""
    (tmp_path / EVENTS).write_text(json.dumps({"e": "header", "schema": SCHEMA + 1}) + "\n")
    with pytest.raises(UsageError, match="newer"):
        read_trace(tmp_path)


def test_unknown_records_and_fields_are_passed_over(tmp_path: Path) -> None:
    """Additions of a later minor version do not make a trace unreadable; unknown kinds are counted."""
    lines = [{"e": "header", "schema": 1, "colour": "green"}, {"e": "aura", "n": 1}, {"e": "end", "n": 2, "outcome": "completed",
             "steps_completed": 3}]  # fmt: skip
    (tmp_path / EVENTS).write_bytes(sealed(*lines))
    trace = read_trace(tmp_path)
    assert trace.end is not None
    assert trace.damage == ("1 record(s) of unknown kind 'aura'",)


def test_a_trace_is_never_overwritten(tmp_path: Path) -> None:
    """A second writer in the same directory is refused."""
    write_example(tmp_path)
    with pytest.raises(FileExistsError):
        TraceWriter(tmp_path)


def test_numbers_that_json_cannot_hold_are_refused(tmp_path: Path) -> None:
    """NaN never reaches the file as an invalid token."""
    writer = TraceWriter(tmp_path)
    with pytest.raises(ValueError, match="JSON"):
        writer.write(Metric(n=0, step=1, values={"loss": float("nan")}))


def test_every_kind_has_a_name_of_its_own() -> None:
    """The registry maps names to classes one to one."""
    assert len(set(KINDS.values())) == len(KINDS)
