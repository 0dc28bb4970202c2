"""The table of magnitudes around the origin of a failure."""

from dataclasses import replace

from report_builders import overflow
from traces import TraceBuilder, tensor

from dtypedoctor.report.build import origin_strip
from dtypedoctor.trace.events import Raised, Replay


def traced() -> TraceBuilder:
    """An overflow between two modules, with its op traced and replayed."""
    builder = TraceBuilder().sample("model.mlp.up_proj", 333.0, step=2)
    op = builder.op("aten.mul.Tensor", "model.mlp", [tensor(1, 318.75), tensor(2, 333.25)], [tensor(3, 56256.0, inf=8)], step=2,
                    inplace=True, function="Fn", autocast="float16")  # fmt: skip
    builder.add(Replay(n=builder.n(), of=op.n, how="float32", finite=True, absmax=77178.0))
    return builder.sample("model.mlp.down_proj", 6620.0, step=2, inf=512).sample(
        "model", 1.0, step=2, nan=4, cls="Model"
    )


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
