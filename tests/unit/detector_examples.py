"""For each detector, by finding: a trace in which it fires, and one that looks like it and in which it is silent."""

from collections.abc import Callable
from dataclasses import dataclass

import mismatch_examples
from collective_examples import gathering
from compilation_examples import BREAK, LIMIT, RECOMPILE, launches, trace
from nonfinite_examples import (
    compiled,
    diverging,
    given,
    gradient,
    guarded,
    masked,
    optimizer_step,
    overflow,
    scores,
    some_masked,
    squares,
    unread_memory,
)  # fmt: skip
from scaling_examples import scaled_use, scales, unscaling
from silent_examples import (
    absorbed,
    angles,
    cast,
    correction,
    erased,
    float8,
    indices,
    lost_writes,
    overshoots,
    positions,
    pretrained,
    rotary,
    rounded_sum,
    rounded_use,
    router,
    scaled,
    stale,
    twins,
    unpatched,
    updates,
)  # fmt: skip
from traces import TraceBuilder

from dtypedoctor.trace.model import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Each builds a trace: one with the finding, one without."""

    fires: Callable[[], Trace]
    silent: Callable[[], Trace]


def pair(fires: Callable[[], TraceBuilder], silent: Callable[[], TraceBuilder]) -> Example:
    return Example(fires=lambda: fires().build(), silent=lambda: silent().build())


HALVING = [(2.0 ** (16 - i), True) for i in range(9)]

DETECTOR_EXAMPLES: dict[str, dict[str, Example]] = {
    "mismatch": {name: Example(fires=one.fires, silent=one.silent) for name, one in mismatch_examples.EXAMPLES.items()},
    "collectives": {"collective-dtype-mismatch": pair(gathering, lambda: gathering(api="all_reduce"))},
    "scaling": {
        "unscale-float16-gradients": pair(lambda: unscaling("Attempting to unscale FP16 gradients."), unscaling),
        "scaler-bfloat16": pair(lambda: unscaling(gradients={"bfloat16": 4}, names={"bfloat16": ["a"]}), unscaling),
        "no-inf-checks": pair(lambda: unscaling("No inf checks were recorded for this optimizer."), unscaling),
    },
    "loss-scale": {
        "loss-scale-exhausted": pair(
            lambda: scales(*[(65536.0, True)] * 8), lambda: scales(*HALVING, *[(128.0, False)] * 3)
        ),
    },
    "scaled-gradients": {"scaled-gradients": pair(scaled_use, unscaling)},
    "non-finite": {
        "float16-overflow": pair(overflow, unread_memory),
        "attention-score-overflow": pair(scores, lambda: scores(product="aten.addmm.default", query="parameter")),
        "norm-square-overflow": pair(squares, lambda: squares("aten.tanh.default")),
        "fully-masked-row": pair(masked, some_masked),
        "backward-overflow": pair(gradient, lambda: gradient(scale=2.0**22, later_taken=True)),
        "nonfinite-parameters": pair(lambda: given("parameter", "mid.1.bias"), lambda: given("input", "args.0")),
        "nonfinite-input": pair(lambda: given("input", "args.0"), lambda: given("input", "args.0", nan=0, neginf=4)),
        "optimizer-epsilon-underflow": pair(optimizer_step, lambda: optimizer_step(dtype="float32")),
        "rounds-out-of-domain": pair(guarded, lambda: guarded(program_finite=False)),
        "divergence": pair(diverging, lambda: diverging(weights=(0.25, 0.3))),
        "domain-error": pair(lambda: overflow(dtype="float32", float32=None, finite=False), overflow),
        "compile-only-nonfinite": pair(compiled, lambda: compiled(eager_finite=False)),
    },
    "compilation": {
        "compile-graph-break": pair(lambda: trace(("graph-break", BREAK)), lambda: trace(("recompile", RECOMPILE))),
        "recompile-limit": pair(lambda: trace(("recompile-limit", LIMIT)), lambda: trace(("recompile", RECOMPILE))),
    },
    "streams": {"stale-cuda-stream": pair(lambda: launches((0, 0x7F10, 42)), lambda: launches((0, 0, 5), (16, 16, 5)))},
    "missing-patches": {"patch-not-applied": pair(unpatched, lambda: correction(hits=3))},
    "stale-autocast-cache": {"stale-autocast-cache": pair(stale, TraceBuilder)},
    "integer-casts": {"float-to-int-cast": pair(cast, TraceBuilder)},
    "float8-casts": {"float8-range": pair(float8, TraceBuilder)},
    "rescues": {
        "silent-rescue": pair(
            lambda: absorbed("aten.nan_to_num.default", "0.0"),
            lambda: absorbed("aten.clamp.default", "0.0", "6.0", error=0.0),
        )
    },
    "erased": {"silent-rescue": pair(erased, lambda: erased(rewards_finite=True))},
    "gradient-underflow": {"gradient-underflow": pair(lambda: scaled(2), lambda: scaled(40))},
    "update-stall": {"update-stall": pair(updates, lambda: updates(lost=32))},
    "lost-writes": {"update-stall": pair(lost_writes, lambda: updates(lost=32))},
    "rounded-indices": {"rounded-indices": pair(indices, TraceBuilder)},
    "rounded-results": {"rounded-result": pair(lambda: rounded_use(20), lambda: rounded_use(1))},
    "rounded-sums": {"rounded-sum": pair(rounded_sum, lambda: updates(lost=32))},
    "step-overshoots": {"optimizer-epsilon-underflow": pair(overshoots, lambda: updates(lost=32))},
    "partial-stall": {"update-stall": pair(lambda: updates(moving=640), lambda: updates(lost=32, moving=640))},
    "router-flips": {"router-flip": pair(lambda: router(18), lambda: router(2))},
    "logprob-gap": {"logprob-gap": pair(twins, lambda: twins(dropout=True))},
    "rotary-tables": {"rounded-rotary-buffer": pair(rotary, TraceBuilder)},
    "rounded-angles": {"rounded-rotary-buffer": pair(angles, TraceBuilder)},
    "rounded-positions": {"rounded-rotary-buffer": pair(positions, TraceBuilder)},
    "loading": {
        "checkpoint-dtype-mismatch": pair(
            lambda: pretrained("bfloat16", "float16", "float16"), lambda: pretrained("float32", "bfloat16", "bfloat16")
        )
    },
}
"""By the detector's name, then by finding id."""
