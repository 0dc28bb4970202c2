"""For each finding about what goes wrong in silence a trace that it is in, and one that looks like it and is healthy."""

from dataclasses import replace
from typing import Any

from traces import TraceBuilder

from dtypedoctor.trace.events import Correction, Observation, ScalerState

BORN = {
    "op": "aten.mul.Tensor",
    "fqn": "ff",
    "source": "model.py:7",
    "dtype": "float16",
    "operands": [889.0, 918.5],
    "float32": 430546.875,
    "bad": 108,
    "elements": 768,
    "squares": False,
    "negative": False,
}


def seen(kind: str, fqn: str | None = None, **values: Any) -> TraceBuilder:
    trace = TraceBuilder()
    return trace.add(
        Observation(n=trace.n(), step=1, call=1, phase="forward", kind=kind, fqn=fqn, values=values | {"fqn": fqn})
    )


def absorbed(op: str, *scalars: str, error: float = 1.0, by_mask: bool = False, through: tuple[str, ...] = (),
             **born: Any) -> TraceBuilder:  # fmt: skip
    """An overflow that ``op`` has ended in finite values; ``born`` changes what is told of the overflow."""
    return seen("absorbed", "ff", op=op, source="model.py:8", scalars=list(scalars), relative_error=error, rescued=108,
                elements=768, by_mask=by_mask, through=[*through, op], born=BORN | {"op": born.pop("by", BORN["op"])} | born)  # fmt: skip


def updates(wanted: int = 64, lost: int = 64, *, moving: int = 0) -> TraceBuilder:
    """What the checks of an optimizer have found so far; ``moving`` updates of other parameters arrive."""
    one = {"wanted": wanted, "lost": lost, "dtype": "bfloat16", "absmax": 1.0, "update": 1e-5}
    return seen("updates", optimizer="AdamW", lr=1e-5, checks=2, first_step=1, parameters={"norm.weight": one},
                wanted=wanted + moving, lost=lost)  # fmt: skip


def indices() -> TraceBuilder:
    """Labels that were cast to bfloat16 with the batch."""
    return seen(
        "rounded-indices",
        source="train.py:9",
        used_at="train.py:12",
        dtype="bfloat16",
        elements=8,
        changed=5,
        before=999,
        after=1000,
    )


def global_state(*, by_library: bool = True) -> TraceBuilder:
    """TF32 is switched on in the second step, by a library or by a line of the program's own."""
    return seen(
        "global-state",
        setting="float32 matmul precision",
        before="highest",
        after="high",
        source="fastlib.quantize:7",
        called_at="train.py:12",
        by_library=by_library,
        has_run=True,
        error=3e-4,
    )


def rounded_sum() -> TraceBuilder:
    """A count of ones in bfloat16."""
    return seen("rounded-sum", source="train.py:9", dtype="bfloat16", added=300, exact=300.0, value=256.0, error=44.0)


def overshoots() -> TraceBuilder:
    """A step that goes much further than the same step of a float32 copy."""
    one = {"elements": 64, "overshot": 40, "dtype": "float16", "moved": 1.22, "update": 6e-4}
    return seen("overshoots", optimizer="AdamW", lr=1e-3, compared=2, parameters={"norm.weight": one})


def summed_gradient(name: str, gradient: float) -> TraceBuilder:
    """A parameter whose updates are lost; its gradient sums 512 rows of gradients of about one in bfloat16."""
    one = {"wanted": 64, "lost": 64, "dtype": "bfloat16", "elements": 32, "absmax": 1.0, "update": 1e-5}
    trace = seen(
        "updates", optimizer="AdamW", lr=1e-5, checks=2, first_step=1, parameters={name: one}, wanted=640, lost=64
    )
    module = name.rpartition(".")[0]
    trace.sample(module, 1.0, kind="grad_output", phase="backward", dtype="bfloat16", shape=[4, 128, 32])
    return trace.sample(name, gradient, kind="grad", phase="backward", dtype="bfloat16", shape=[32])


def scaled(zeros_scaled: int, *, scaler: bool = False, name: str = "enc.weight") -> TraceBuilder:
    """A gradient that is all zero, and how much of it is zero when the loss is scaled."""
    one = {"elements": 40, "zeros": 40, "zeros_scaled": zeros_scaled, "largest": 3e-9}
    trace = seen("scaled-backward", scale=32768.0, parameters={name: one})
    if scaler:
        trace.add(ScalerState(n=trace.n(), step=1, scale=1024.0, found_inf=False, skipped=False))
    return trace


def rotary(dtype: str = "bfloat16", name: str = "rope.freqs", angle_error: float = 1.16) -> TraceBuilder:
    """A rounded table of frequencies."""
    return seen("rotary-table", "rope", name=name, dtype=dtype, rounded_to="bfloat16", length=16, first=1.0,
                last=1.8e-4, deviation=0.0046, angle_error=angle_error, read=True)  # fmt: skip


def router(flipped: int) -> TraceBuilder:
    """A router over 512 tokens."""
    return seen("router", "moe.gate", op="aten.topk.default", source="moe.py:9", scores_op="aten.mm.default",
                scores_source="moe.py:8", dtype="bfloat16", experts=64, chosen=8, tokens=512, flipped=flipped,
                tied=35)  # fmt: skip


def cast() -> TraceBuilder:
    """An activation that went through uint8."""
    return seen("float-to-int", "steps.0", op="aten._to_copy.default", source="model.py:26", to="uint8",
                relative_error=101.4, elements=2048, used_by="aten._to_copy.default", used_at="model.py:26",
                **{"from": "float32"})  # fmt: skip


def twins(gap: float = 0.2, *, apart: float = 0.0) -> TraceBuilder:
    """A generator and a trainer with the same weights."""
    return seen("twins", trainer=1, generator=0, trainer_dtype="float32", generator_dtype="bfloat16", rows=56, choices=64,
                largest_gap=gap, mean_gap=gap / 10, moved=gap, apart=apart)  # fmt: skip


def unpatched() -> TraceBuilder:
    """A class that keeps an original which still runs."""
    return seen(
        "unpatched", "mlp", attribute="_original_forward", method="forward", source="m.py:3", **{"class": "MLP"}
    )


def refused(by: str = "") -> TraceBuilder:
    """The same, and it is known what was to replace it; the patch may have been left out before the original was kept."""
    return seen(
        "unpatched",
        "mlp",
        attribute="" if by else "_original_forward",
        refused_by=by,
        method="forward",
        source="m.py:3",
        patcher="patch_mlp",
        replacement="lib/patches.py:7",
        surplus="cache",
        missing="scale",
        **{"class": "MLP"},
    )


def correction(*, hits: int, rescued: int = 0, installed: bool = True) -> TraceBuilder:
    """A correction at the beginning and at the end of a run."""
    trace = TraceBuilder()
    record = Correction(
        n=trace.n(),
        id="safe-product",
        target="MLP.forward",
        installed=installed,
        reason="" if installed else "the signature has changed",
        proof="code object replaced",
    )
    return trace.add(record, replace(record, n=trace.n(), hits=hits, rescued=rescued))


def pretrained(stored: str, loaded: str, requested: str | None) -> TraceBuilder:
    """A checkpoint and the model made of it."""
    return seen("pretrained", model="Llama", stored={stored: 100}, loaded={loaded: 100}, requested=requested)


def state_loaded(became_zero: int) -> TraceBuilder:
    return seen("state-loaded", casts={"bfloat16->float16": 773}, became_inf=0, became_zero=became_zero, elements=773,
                names=["0.weight"])  # fmt: skip


def moments(*, became_zero: int = 0, became_inf: int = 0) -> TraceBuilder:
    """Second moments that were stored in float16."""
    return seen("moments-stored-in-half", optimizer="Adam", keys=["exp_avg_sq"], parameters=2, became_zero=became_zero,
                became_inf=became_inf, compared=4096)  # fmt: skip
