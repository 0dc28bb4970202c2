"""The table of magnitudes around the origin of a failure."""

from traces import TraceBuilder, tensor

from dtypedoctor.trace.events import Replay


def traced() -> TraceBuilder:
    """An overflow between two modules, with its op traced and replayed."""
    builder = TraceBuilder().sample("model.mlp.up_proj", 333.0, step=2)
    op = builder.op("aten.mul.Tensor", "model.mlp", [tensor(1, 318.75), tensor(2, 333.25)], [tensor(3, 56256.0, inf=8)], step=2,
                    inplace=True, function="Fn", autocast="float16")  # fmt: skip
    builder.add(Replay(n=builder.n(), of=op.n, how="float32", finite=True, absmax=77178.0))
    return builder.sample("model.mlp.down_proj", 6620.0, step=2, inf=512).sample(
        "model", 1.0, step=2, nan=4, cls="Model"
    )
