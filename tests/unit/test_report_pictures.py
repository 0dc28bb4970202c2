"""What is distilled from a trace for a person to look at."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from report_builders import overflow
from traces import TraceBuilder, tensor

from dtypedoctor.report.document import Map
from dtypedoctor.report.magnitude_table import origin_strip
from dtypedoctor.report.model import Picture, Report, Status
from dtypedoctor.report.pictures import (
    LANES,
    MOST_COLUMNS,
    MOST_OPS,
    map_data,
    picture_of,
    why_it_changes,
)
from dtypedoctor.trace.events import Flow, Observed, ParameterNote, Raised, Replay
from dtypedoctor.trace.records.silent import StalledParameter, Updates


def module(picture: Picture, fqn: str) -> Mapping[str, Any]:
    """The module of that name, as the page reads it."""
    (found,) = [m for m in picture.modules if m["f"] == fqn]
    return found


def lanes(picture: Picture, fqn: str) -> dict[str, list[float]]:
    """The magnitudes of a module by lane; -1 where nothing was measured."""
    return {list(LANES)[lane]: values for lane, _, values, _ in module(picture, fqn)["s"]}


def flow(inputs: list[str], outputs: list[str], weights: list[str] | None = None, autocast: str | None = None) -> Flow:
    """Dtypes of one module call."""
    return Flow(n=1, step=1, call=1, phase="forward", root=0, fqn="m", cls="M", inputs=inputs, outputs=outputs,
                weights=weights or [], autocast=autocast)  # fmt: skip


def test_a_column_of_the_magnitude_map_holds_the_largest_of_its_step() -> None:
    """Several calls in one step count once, at their worst; a step without a call is a gap."""
    trace = TraceBuilder().sample("a", 1.0, step=1).sample("a", 3.0, step=1).sample("a", 2.0, step=3).build()
    assert module(picture_of(trace, "before"), "a")["s"] == [[0, "float16", [3.0, -1, 2.0], {}]]


def test_what_is_not_finite_is_counted_by_column() -> None:
    """The page shows where inf and NaN begin and how many elements they are."""
    trace = TraceBuilder().sample("a", 1.0, index="0").sample("a", 7.0, index="1", step=2, inf=3)
    picture = picture_of(trace.sample("a", 0.0, index="2", step=2, nan=2).build(), "before")
    assert module(picture, "a")["s"][0][3] == {1: [2, 3]}
    assert [tensor[4:] for tensor in module(picture, "a")["t"]] == [[1.0, 0, 0], [7.0, 0, 3], [0.0, 2, 0]]


def test_lanes_tell_outputs_gradients_and_parameters_apart() -> None:
    """Parameters and their gradients belong to the module that holds them; what no lane shows is left out."""
    trace = (
        TraceBuilder()
        .sample("a", 1.0, phase="generate")
        .sample("a", 2.0, phase="recompute")
        .sample("a", 3.0, phase="backward", kind="grad_output")
        .sample("a.weight", 4.0, phase="backward", kind="grad", cls="")
        .sample("a.weight", 5.0, phase="optimizer", kind="param", cls="")
        .sample("a", 6.0, kind="entered")
        .sample("a", 7.0, phase="probe")
        .build()
    )
    picture = picture_of(trace, "before")
    assert lanes(picture, "a") == {
        "generate": [1.0], "forward": [2.0], "backward": [3.0], "gradients": [4.0], "parameters": [5.0],
    }  # fmt: skip
    assert [tensor[0] for tensor in module(picture, "a")["t"]] == [
        "output", "output", "gradient of output", "gradient of weight", "parameter weight",
    ]  # fmt: skip


def test_a_long_run_is_shown_at_its_worst_in_fewer_columns() -> None:
    """Ten thousand steps make two hundred columns, each labelled with the steps it stands for."""
    builder = TraceBuilder()
    for step in range(1, 10_001, 7):
        builder.sample("a", float(step), step=step)
    picture = picture_of(builder.build(), "before")
    assert len(picture.columns) <= MOST_COLUMNS
    assert picture.columns[0] == "1–50"
    assert lanes(picture, "a")["forward"][0] == 50.0


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (flow(["float16"], ["float16"]), ""),
        (flow(["float16", "float32"], ["float32"]), ""),
        (flow(["int64"], ["bool"]), ""),
        (flow(["float32"], ["float16"], ["float32"], autocast="float16"), "autocast runs it in float16"),
        (flow(["bfloat16"], ["float32"], ["float32"]), "its float32 weights promote the result to float32"),
        (flow(["bfloat16", "float16"], ["float32"]), "inputs of bfloat16 and float16 are promoted to float32"),
        (flow(["float32"], ["bfloat16"], ["bfloat16"]), "it casts to the dtype of its weights"),
        (flow(["float16"], ["float32"]), "a cast inside it"),
        (flow(["int64"], ["float16"], ["float16"]), "it looks up values in the dtype of its weights"),
        (flow(["int64"], ["float32"]), ""),
    ],
)
def test_the_dtype_flow_says_why_a_dtype_changes(seen: Flow, why: str) -> None:
    """Autocast first, then promotion, then a cast; a container that only hands on is silent."""
    assert why_it_changes(seen) == why


def traced() -> TraceBuilder:
    """An overflow between two modules, with its op traced and replayed."""
    builder = TraceBuilder().sample("model.mlp.up_proj", 333.0, step=2)
    op = builder.op("aten.mul.Tensor", "model.mlp", [tensor(1, 318.75), tensor(2, 333.25)], [tensor(3, 56256.0, inf=8)], step=2,
                    inplace=True, function="Fn", autocast="float16")  # fmt: skip
    builder.add(Replay(n=builder.n(), of=op.n, how="float32", finite=True, absmax=77178.0))
    return builder.sample("model.mlp.down_proj", 6620.0, step=2, inf=512).sample(
        "model", 1.0, step=2, nan=4, cls="Model"
    )


def note(name: str, dtype: str, **more: Any) -> ParameterNote:
    """A parameter of the only model."""
    return ParameterNote(n=1, root=0, name=name, dtype=dtype, shape=[4], **more)


def test_the_module_that_raised_tells_its_dtypes() -> None:
    """It has returned nothing: they are those of the operator that rejected them. An operator that runs adds nothing."""
    builder = TraceBuilder()
    weight = tensor(2, dtype="bfloat16", name="q.weight", origin="parameter")
    builder.op("aten.mm.default", "q", [tensor(1, dtype="float32"), weight], [], error="no")
    builder.op("aten.mm.default", "k", [tensor(1, dtype="float32"), weight], [tensor(3)])
    picture = picture_of(builder.build(), "baseline")
    assert module(picture, "q")["w"] == [["forward", 1, ["float32"], ["bfloat16"], [], None, "", "aten.mm.default"]]
    assert [m["f"] for m in picture.modules] == ["q"]


def test_weights_of_modules_that_were_not_called_are_known() -> None:
    """They stand after those that were called, in the dtype that they have at last; packed ones in their format; no buffers."""
    trace = TraceBuilder().sample("late", 1.0)
    trace.add(
        note("head.weight", "float16"), note("late.weight", "float32"), note("late.table", "float64", buffer=True)
    )
    trace.add(note("head.weight", "bfloat16"), note("packed.weight", "uint8", quant={"kind": "nf4"}))
    found = picture_of(trace.build(), "baseline").modules
    assert [(m["f"], m["p"]) for m in found] == [("late", ["float32"]), ("head", ["bfloat16"]), ("packed", ["nf4"])]


def lost(step: int, **counts: tuple[int, int]) -> Observed[Updates]:
    """Updates up to ``step``: of each parameter how many are lost, of how many."""
    parameters = {
        name.replace("_", "."): StalledParameter(wanted=wanted, lost=gone, dtype="bfloat16", absmax=1.0, update=1e-5)
        for name, (gone, wanted) in counts.items()
    }
    what = Updates(optimizer="SGD", lr=1.0, checks=step, first_step=1, wanted=1, lost=1, parameters=parameters)
    return Observed(n=step, step=step, call=1, phase="optimizer", what=what)


def test_lost_updates_have_a_lane_in_percent() -> None:
    """Up to each step that was checked; of several parameters the one that loses most; 100 only where all are lost."""
    trace = TraceBuilder().sample("a", 1.0, step=1).sample("a", 1.0, step=4)
    trace.add(note("a.weight", "bfloat16"), note("a.bias", "bfloat16"), note("b.weight", "bfloat16"))
    trace.add(lost(1, a_weight=(1, 2), a_bias=(2, 3), b_weight=(1, 1)))
    trace.add(lost(4, a_weight=(9_999, 10_000), a_bias=(1, 2), unknown_weight=(1, 1)))
    picture = picture_of(trace.build(), "baseline")
    assert [value for value in lanes(picture, "a")["updates"] if value != -1] == [66.6, 99.9]
    assert [(line[0], line[2], line[3]) for line in module(picture, "a")["u"]] == [
        ("weight", 9_999, 10_000),
        ("bias", 1, 2),
    ]


def test_what_trains_in_the_end_has_lost_no_updates() -> None:
    """A parameter that is not in the last record has lost less than half; one that no model has is in no module; nor is a step that was not measured."""
    trace = TraceBuilder().sample("a", 1.0, step=1).sample("a", 1.0, step=4).add(note("a.weight", "bfloat16"))
    trace.add(lost(1, a_weight=(1, 1)), lost(4, unknown_weight=(1, 1)))
    picture = picture_of(trace.build(), "baseline")
    assert [m["f"] for m in picture.modules] == ["a"]
    assert not module(picture, "a")["u"]
    assert "updates" not in lanes(picture, "a")
    late = TraceBuilder().sample("a", 1.0, step=1).add(note("a.weight", "bfloat16")).add(lost(9, a_weight=(1, 1)))
    assert not module(picture_of(late.build(), "baseline"), "a")["u"]


@pytest.mark.parametrize(
    ("finding", "phase", "lane"),
    [
        ("operand-dtype-mismatch", "forward", "dtypes"),
        ("update-stall", "optimizer", "updates"),
        ("float16-overflow", "recompute", "forward"),
        ("float16-overflow", "static", ""),
        ("of-another-package", "generate", "generate"),
    ],
)
def test_the_map_begins_with_what_shows_the_finding(finding: str, phase: str, lane: str) -> None:
    """Dtypes where they disagree, lost updates where training stands still, else the magnitudes of the finding's phase."""
    found = replace(overflow().findings[0], id=finding, phase=phase)
    (told,) = json.loads(map_data(Map((), (found,))))["findings"]
    assert told["lane"] == lane


def test_ops_tell_where_a_value_was_born() -> None:
    """Finite operands and a non-finite result mark the op; the replay stands beside it."""
    (line,) = picture_of(traced().build(), "before").ops
    *_, operands, results, _, notes, born = line
    assert born
    assert operands[0] == "f16 2×4 absmax 318.8"
    assert results == ["f16 2×4 absmax 56,256 8 inf"]
    assert notes == ["in place", "inside Fn", "autocast float16", "again in float32: finite, absmax 77,178"]


def test_a_mask_of_infinities_is_no_birth() -> None:
    """Attention masks are filled with -inf on purpose."""
    builder = TraceBuilder()
    builder.op("aten.masked_fill.Scalar", "attn", [tensor(1)], [tensor(2, inf=3)], scalars=["-inf"])
    builder.op("aten.full.default", "attn", [], [tensor(3, inf=3)], scalars=["[2]", "-inf"])
    assert [line[-1] for line in picture_of(builder.build(), "before").ops] == [0, 0]


def test_of_many_ops_those_around_the_failure_are_kept() -> None:
    """The page stays small and still shows what matters."""
    builder = TraceBuilder()
    for number in range(3000):
        builder.op("aten.add.Tensor", "m", [tensor(number)], [tensor(number + 1, inf=1 if number >= 2000 else 0)])
    lines = picture_of(builder.build(), "before").ops
    assert len(lines) == MOST_OPS
    assert sum(line[-1] for line in lines) == MOST_OPS // 2


def test_the_strip_shows_an_origin_between_two_modules() -> None:
    """The product overflows after up_proj has returned and before down_proj has: it has a row of its own."""
    finding = overflow().findings[0]
    rows = origin_strip(traced().build(), replace(finding, fqn="model.mlp"))
    assert [(row.fqn, row.is_origin, row.num_inf) for row in rows] == [
        ("model.mlp.up_proj", False, 0), ("model.mlp", True, 8), ("model.mlp.down_proj", False, 512), ("model", False, 0),
    ]  # fmt: skip
    assert rows[1].absmax == 56256.0


def test_a_mismatch_has_no_strip() -> None:
    """Everything is finite, so how large the values are says nothing about why the dtypes do not fit."""
    trace = (
        TraceBuilder().sample("norm", 2.0, dtype="float32").sample("other", 2.0, call=2)
        .add(Raised(n=99, step=1, call=1, phase="forward", type="RuntimeError", message="no", frames=[], modules=["q_proj"])).build()
    )  # fmt: skip
    finding = overflow().findings[0]
    assert origin_strip(trace, replace(finding, fqn="q_proj", dtype="float32")) == ()
    assert origin_strip(trace, None) == ()
    assert origin_strip(TraceBuilder().sample("a", 1.0).build(), finding) == ()


def test_the_pages_data_cannot_end_its_element() -> None:
    """No less-than sign, no ampersand, no character beyond ASCII, and no token that is not JSON."""
    trace = TraceBuilder().sample("</script><!--\u202ex", 1.0, cls="<b>").sample("a", 0.0, inf=3).build()
    report = Report(name="x", status=Status.HEALTHY, headline="h", pictures=(picture_of(trace, "</script>&"),))
    text = map_data(Map(report.pictures, report.findings))
    assert text.isascii()
    assert not set("<>&") & set(text)
    (run,) = json.loads(text)["runs"]
    assert run["label"] == "</script>&"
    assert run["modules"][0]["f"] == "</script><!--\\u202ex"
    assert run["modules"][1]["s"] == [[0, "float16", [0], {"0": [0, 3]}]]
