"""For each finding about inf and NaN a trace that it is in, and one that looks like it and is healthy or something else."""

from typing import Any

from traces import TraceBuilder, tensor

from dtypedoctor.trace.events import Observation, Raised, Replay, ScalerState


def replayed(trace: TraceBuilder, of: int, absmax: float | None, *, finite: bool = True, how: str = "float32") -> None:
    """The op with number ``of`` was run again in a wider dtype."""
    trace.add(Replay(n=trace.n(), of=of, how=how, finite=finite, absmax=absmax))


def overflow(*, dtype: str = "float16", float32: float | None = 77178.0, finite: bool = True) -> TraceBuilder:
    """A product that leaves the range inside `mlp`, is passed on by `mlp.down` and becomes NaN in `norm`."""
    trace = TraceBuilder()
    product = trace.op("aten.mul.Tensor", "mlp", [tensor(1, 318.75, dtype=dtype), tensor(2, 333.25, dtype=dtype)],
                       [tensor(3, 56256.0, dtype=dtype, inf=2)])  # fmt: skip
    replayed(trace, product.n, float32, finite=finite)
    trace.op("aten.mm.default", "mlp.down", [tensor(3, inf=2, dtype=dtype), tensor(4)], [tensor(5, inf=1, dtype=dtype)])
    trace.sample("mlp.down", 6620.0, inf=1, dtype=dtype, cls="Linear")
    trace.op("aten.native_layer_norm.default", "norm", [tensor(5, inf=1, dtype=dtype)], [tensor(6, nan=8, dtype=dtype)])
    return trace.sample("norm", 0.0, nan=8, dtype=dtype, cls="LayerNorm")


def unread_memory() -> TraceBuilder:
    """A module returns inf in a corner that the loss does not look at."""
    trace = TraceBuilder().sample("range", 1.0, inf=2)
    return trace.sample("", 2.0, kind="loss").sample("lin.weight", 0.5, kind="grad", phase="backward")


def diverging(
    *, weights: tuple[float, float] = (0.25, 30.0), losses: tuple[float, float] = (1.0, 120.0)
) -> TraceBuilder:
    """Two training steps, and a product that leaves the range in the third."""
    trace = TraceBuilder()
    for step, loss in enumerate(losses, 1):
        trace.sample("", loss, kind="loss", dtype="float32", step=step, call=step)
        trace.sample("out.weight", loss / 10, kind="grad", phase="backward", dtype="float32", step=step, call=step)
        if step == 1:
            trace.sample(
                "out.weight", weights[0], kind="initial", phase="optimizer", dtype="float32", step=step, call=step
            )
        size = weights[step - 1]
        trace.sample("out.weight", size, kind="param", phase="optimizer", dtype="float32", step=step, call=step)
    product = trace.op(
        "aten.addmm.default", "out", [tensor(1, 900.0), tensor(2, 800.0)], [tensor(3, inf=1)], step=3, call=3
    )
    replayed(trace, product.n, 2e5)
    return trace.sample("out", 6e4, inf=1, step=3, call=3).sample("", 6e4, inf=1, step=3, call=3)


def scores(
    *, product: str = "aten.bmm.default", query: str = "", float32: float = 93000.0, **tried: Any
) -> TraceBuilder:
    """Scores that leave the range, are scaled, and go into a softmax; ``tried`` is what an experiment on it has shown."""
    trace = TraceBuilder()
    birth = trace.op(product, "look", [tensor(1, 300.0, origin=query, name=query or None), tensor(2, 310.0)],
                     [tensor(3, num_neginf=1)])  # fmt: skip
    replayed(trace, birth.n, float32)
    trace.op("aten.div.Tensor", "look", [tensor(3, num_neginf=1)], [tensor(4, num_neginf=1)])
    softmax = trace.op("aten._softmax.default", "look", [tensor(4, num_neginf=1)], [tensor(5, nan=4)])
    if tried:
        values = {"nan_rows": 1, "unattended": 0, "exact_finite": True, "unmasked_finite": True, "sdpa_finite": True,
                  "sdpa_absmax": 3.5, "scale": 0.25, "scores": birth.n, "softmax": softmax.n} | tried  # fmt: skip
        trace.add(
            Observation(n=trace.n(), step=1, call=1, phase="forward", kind="attention-replay", fqn=None, values=values)
        )
    return trace.sample("look", 0.0, nan=4, cls="Look").sample("", 0.0, nan=4, cls="Model")


def masked(*, posinf: int = 0) -> TraceBuilder:
    """A softmax over scores that a mask has filled."""
    trace = TraceBuilder()
    fill = tensor(2, 1.0, inf=posinf, num_neginf=4)
    trace.op("aten.masked_fill.Scalar", "pool", [tensor(1)], [fill], scalars=["-inf"])
    trace.op("aten._softmax.default", "pool", [fill], [tensor(3, nan=4)])
    return trace.sample("pool", 0.0, nan=4, cls="Pool")


def gradient(*, scale: float | None = None, later_taken: bool = False, float32: float = 2.0**20) -> TraceBuilder:
    """A gradient that leaves the range in the backward of `out`, with or without a loss scaler."""
    trace = TraceBuilder().sample("out", 3.0).sample("", 2.0, kind="loss", dtype="float32")
    birth = trace.op(
        "aten.mm.default", "out", [tensor(1, 900.0), tensor(2, 800.0)], [tensor(3, inf=1)], phase="backward"
    )
    replayed(trace, birth.n, float32)
    trace.sample("lin", 1.0, inf=1, kind="grad_output", phase="backward")
    if scale is not None:
        trace.add(ScalerState(n=trace.n(), step=1, scale=scale, found_inf=True, skipped=True))
    if later_taken:
        trace.add(ScalerState(n=trace.n(), step=3, scale=512.0, found_inf=False, skipped=False))
    return trace


def given(origin: str, name: str | None, *, nan: int = 1, neginf: int = 0) -> TraceBuilder:
    """The first op of a call gets an operand that no op has made."""
    trace = TraceBuilder()
    operand = tensor(1, 2.0, nan=nan, num_neginf=neginf, origin=origin, name=name)
    trace.op("aten.addmm.default", "mid.1", [tensor(7), operand, tensor(8)], [tensor(2, nan=8)])
    return trace.sample("mid.1", 0.0, nan=8).sample("", 0.0, nan=8)


def optimizer_step(*, dtype: str = "float16", epsilon: str = "1e-08") -> TraceBuilder:
    """A division by a denominator to which a guard was added, in the optimizer."""
    trace = TraceBuilder().sample("emb.weight", 0.1, kind="grad", phase="backward", dtype=dtype)
    trace.op("aten.add_.Tensor", "", [tensor(1, 0.0, dtype=dtype)], [tensor(2, 0.0, dtype=dtype)], phase="optimizer",
             scalars=[epsilon], root=-1)  # fmt: skip
    birth = trace.op("aten.addcdiv_.default", "", [tensor(3, dtype=dtype), tensor(4, dtype=dtype), tensor(2, 0.0, dtype=dtype)],
                     [tensor(5, nan=2, dtype=dtype)], phase="optimizer", root=-1)  # fmt: skip
    replayed(trace, birth.n, None, finite=False)
    return trace.sample("emb.weight", 1.0, nan=2, kind="param", phase="optimizer", dtype=dtype)


def refused_sampling() -> TraceBuilder:
    """Code outside of all modules draws from probabilities that it has made NaN itself."""
    trace = TraceBuilder().sample("", 3.0, call=2)
    trace.op("aten.masked_fill.Scalar", "", [tensor(1)], [tensor(2, num_neginf=8)], scalars=["-inf"], call=2, root=-1)
    trace.op("aten._softmax.default", "", [tensor(2, num_neginf=8)], [tensor(3, nan=8)], call=2, root=-1)
    trace.op(
        "aten.multinomial.default", "", [tensor(3, nan=8)], [], call=2, root=-1, error="probability tensor contains"
    )
    message = "probability tensor contains either `inf`, `nan` or element < 0"
    return trace.add(
        Raised(
            n=trace.n(), step=1, call=2, phase="forward", type="RuntimeError", message=message, frames=[], modules=[]
        )
    )
