"""For each finding about dtypes that do not go together a trace in which it is made, and one like it in which it is not."""

from collections.abc import Callable
from dataclasses import dataclass

from refusals import HALF, IN_PLACE, PRODUCT, Story

from dtypedoctor.trace.events import Flow, Replay
from dtypedoctor.trace.model import Trace

F32 = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """``fires`` leads to the finding, at ``fqn`` and for the named ``reason``; ``silent`` leads to none at all."""

    fires: Callable[[], Trace]
    silent: Callable[[], Trace]
    fqn: str | None
    reason: str | None = None
    confidence: str = "proven"


def norm(*, casts_back: bool) -> Trace:
    """A norm with a float32 weight before a bfloat16 layer; it multiplies last, or casts its product back."""
    story = Story().body()
    x = story.run("aten.embedding.default", "words", [story.parameter("words.weight", HALF)], HALF)
    wide = story.run("aten._to_copy.default", "norm", [x], F32)
    root = story.run("aten.rsqrt.default", "norm", [wide], F32)
    scaled = story.run("aten.mul.Tensor", "norm", [wide, root], F32)
    weight = story.parameter("norm.weight", F32, shape=[4])
    if casts_back:
        product = story.run("aten.mul.Tensor", "norm", [weight, scaled], F32)
        x = story.run("aten._to_copy.default", "norm", [product], HALF)
        story.run("aten.mm.default", "query", [x, story.parameter("query.weight", HALF)], HALF)
        return story.build()
    narrow = story.run("aten._to_copy.default", "norm", [scaled], HALF)
    x = story.run("aten.mul.Tensor", "norm", [weight, narrow], F32)
    story.refuse("aten.mm.default", "query", [x, story.parameter("query.weight", HALF)], PRODUCT)
    return story.ended()


def buffer(*, dtype: str) -> Trace:
    """Readings that are divided by a buffer before a bfloat16 layer."""
    story = Story().body()
    x = story.run(
        "aten.div.Tensor", "prepare", [story.given(HALF), story.parameter("prepare.spread", dtype, buffer=True)], dtype
    )
    operands = [x, story.parameter("body.weight", HALF, note=False)]
    if dtype == HALF:
        story.run("aten.mm.default", "body", operands, HALF)
        return story.build()
    story.refuse("aten.mm.default", "body", operands, PRODUCT)
    return story.ended()


def model_input(*, dtype: str) -> Trace:
    """A batch that goes straight into a layer."""
    story = Story().body()
    operands = [story.given(dtype), story.parameter("body.weight", HALF, note=False)]
    if dtype == HALF:
        story.run("aten.mm.default", "body", operands, HALF)
        return story.build()
    story.refuse("aten.mm.default", "body", operands, PRODUCT)
    return story.ended()


def adapter(*, cast: bool) -> Trace:
    """A low-rank float32 update beside a frozen layer, whose input is cast or not."""
    story = Story().body()
    base = story.parameter("wrapped.base.weight", HALF, shape=[64, 64])
    down = story.parameter("wrapped.down.weight", F32, shape=[4, 64], requires_grad=True)
    x = story.run("aten.mm.default", "wrapped.base", [story.given(HALF), base], HALF)
    if cast:
        x = story.run("aten._to_copy.default", "wrapped", [x], F32)
        story.run("aten.mm.default", "wrapped.down", [x, down], F32)
        return story.build()
    story.refuse("aten.mm.default", "wrapped.down", [x, down], PRODUCT)
    return story.ended()


def head(*, dtype: str) -> Trace:
    """The last layer in a dtype of its own."""
    story = Story().body()
    operands = [story.given(HALF), story.parameter("answer.weight", dtype)]
    if dtype == HALF:
        story.run("aten.mm.default", "answer", operands, HALF)
        return story.build()
    x = story.run("aten.relu.default", "body", [story.run("aten.mm.default", "body", operands[:1], HALF)], HALF)
    story.refuse("aten.mm.default", "answer", [x, operands[1]], PRODUCT)
    return story.ended()


def embedding(*, dtype: str) -> Trace:
    """An embedding in a dtype of its own before the first layer."""
    story = Story().body()
    x = story.run(
        "aten.embedding.default", "words", [story.parameter("words.weight", dtype), story.given("int64")], dtype
    )
    operands = [x, story.parameter("body.weight", HALF, note=False)]
    if dtype == HALF:
        story.run("aten.mm.default", "body", operands, HALF)
        return story.build()
    story.refuse("aten.mm.default", "body", operands, PRODUCT)
    return story.ended()


def bypass(*, inside: str | None) -> Trace:
    """A product and a sum in place of float32 operands, inside a region or outside of any."""
    story = Story().body(F32)
    x, a = story.given(F32), story.parameter("side.a", F32)
    if inside is None:
        product = story.run("aten.mm.default", "side", [x, a], F32)
        story.run("aten.addmm_.default", "side", [x, product, a], F32, like=x, inplace=True)
        return story.build()
    casts = [story.run("aten._to_copy.default", "side", [t], inside, autocast=inside) for t in (x, a)]
    product = story.run("aten.mm.default", "side", casts, inside, autocast=inside)
    story.refuse("aten.addmm_.default", "side", [x, product, a], IN_PLACE, inplace=True, autocast=inside)
    return story.ended()


def contradiction(*, weights: str) -> Trace:
    """A float16 region around a model."""
    story = Story().body(weights)
    story.saw("autocast-region", device="cpu", wanted="float16", enabled=True, source="train.py:3")
    story.add(Flow(n=story.n(), step=1, call=1, phase="forward", root=0, fqn="body", cls="Linear", inputs=[weights],
                   outputs=["float16"], weights=[weights], autocast="float16"))  # fmt: skip
    return story.build()


def wrong_device(*, device: str) -> Trace:
    """A float16 input for a float32 model inside a region for some device."""
    story = Story().body(F32)
    operands = [story.given("float16"), story.parameter("body.weight", F32, note=False)]
    if device == "cpu":
        casts = [story.run("aten._to_copy.default", "body", [t], "float16", autocast="float16") for t in operands]
        story.run("aten.mm.default", "body", casts, "float16", autocast="float16")
        return story.build()
    refused = story.refuse("aten.mm.default", "body", operands, PRODUCT)
    region = {"device": device, "wanted": "float16", "enabled": False, "source": "train.py:3"}
    return story.saw("autocast-regions", of=refused.n, device="cpu", regions=[region]).ended()


def custom_function(*, decorated: bool) -> Trace:
    """A hand-written backward after a forward in a bfloat16 region, which it re-enters or not."""
    story = Story().body(F32)
    saved, gradient = story.parameter("gate.weight", F32), story.tensor(HALF)
    story.saw("custom-function", "gate", function="Product", decorated=decorated, fwd_used_autocast=decorated or None,
              forward_autocast=HALF, forward_source="net.py:9")  # fmt: skip
    if decorated:
        cast = story.run(
            "aten._to_copy.default", "gate", [saved], HALF, phase="backward", function="Product", autocast=HALF
        )
        story.run(
            "aten.mm.default", "gate", [gradient, cast], HALF, phase="backward", function="Product", autocast=HALF
        )
        return story.build()
    story.refuse("aten.mm.default", "gate", [gradient, saved], PRODUCT, phase="backward", function="Product")
    return story.ended()


def packed(story: Story, name: str, dtype: str, *, state: str) -> tuple:
    stored = story.parameter(
        name, "uint8", shape=[8, 1], quant={"kind": "nf4", "dtype": state, "compute_dtype": None, "shape": [4, 4]}
    )
    return stored, story.run("bitsandbytes.dequantize_4bit.default", "fused", [stored, story.tensor(F32)], dtype)


def quant_state(*, state: str) -> Trace:
    """Activations in bfloat16 and a packed weight whose state says something."""
    story = Story().body()
    _, dense = packed(story, "wide.weight", state, state=state)
    operands = [story.given(HALF), dense]
    if state == HALF:
        story.run("aten.mm.default", "fused", operands, HALF)
        return story.build()
    story.refuse("aten.mm.default", "fused", operands, PRODUCT)
    return story.ended()


def stale_buffer(*, memory: str) -> Trace:
    """A float16 weight that is dequantised into memory from before the call, typed as ``memory``."""
    story = Story().body("float16")
    _, dense = packed(story, "wide.weight", "float16", state="float16")
    scratch = story.tensor(memory)
    seen = story.run("aten.view.dtype", "fused", [scratch], "float16", like=scratch)
    story.op("aten.copy_.default", "fused", [seen, dense], [story.tensor("float16", like=scratch)], inplace=True)
    operands = [story.given("float16"), story.tensor(memory, like=scratch)]
    if memory == "float16":
        story.run("aten.mm.default", "fused", operands, "float16")
        return story.build()
    refused = story.refuse("aten.mm.default", "fused", operands, PRODUCT)
    story.saw("packed-weight", "wide", of=refused.n, operand=1, weight="wide.weight", dtype=memory, quant_dtype="float16",
              relative_error=1.0)  # fmt: skip
    return story.ended()


def used_as_dense(*, unpacked: bool) -> Trace:
    """A product with a 4-bit layer's weight, made dense first or not."""
    story = Story().body()
    stored, dense = packed(story, "mixer.out.weight", HALF, state=HALF)
    if unpacked:
        story.run("aten.mm.default", "mixer", [story.given(HALF), dense], HALF)
        return story.build()
    view = story.run("aten.t.default", "mixer", [stored], "uint8", like=stored)
    story.refuse(
        "aten.mm.default", "mixer", [story.given(HALF), view], "mat1 and mat2 shapes cannot be multiplied (2x4 and 1x8)"
    )
    return story.ended()


def attention(*, tables: str) -> Trace:
    """Queries that are turned by tables in some dtype, values that are not."""
    story = Story().body()
    q, v = (
        story.run("aten.mm.default", "attend", [story.given(HALF), story.parameter(n, HALF)], HALF)
        for n in ("q.w", "v.w")
    )
    turned = story.run("aten.mul.Tensor", "attend", [q, story.parameter("attend.cos", tables, buffer=True)], tables)
    if tables == HALF:
        story.run("aten.scaled_dot_product_attention.default", "attend", [turned, turned, v], HALF)
        return story.build()
    message = "Expected query, key, and value to have the same dtype, but got query.dtype: float"
    story.refuse("aten.scaled_dot_product_attention.default", "attend", [turned, turned, v], message)
    return story.ended()


def cache(*, dtype: str) -> Trace:
    """Keys written at positions into memory from before the call."""
    story = Story().body()
    keys = story.run("aten.mm.default", "block", [story.given(HALF), story.parameter("block.k.weight", HALF)], HALF)
    store = story.tensor(dtype, name="block.keys", origin="attribute")
    if dtype == HALF:
        story.run(
            "aten.index_copy_.default", "block", [store, story.tensor("int64"), keys], HALF, like=store, inplace=True
        )
        return story.build()
    message = (
        "index_copy_(): self and source expected to have the same dtype, but got (self) Half and (source) BFloat16"
    )
    story.refuse("aten.index_copy_.default", "block", [store, story.tensor("int64"), keys], message, inplace=True)
    return story.ended()


def merge(*, tower: str) -> Trace:
    """Picture features written into word embeddings under a mask."""
    story = Story().body()
    words = story.run(
        "aten.embedding.default", "words", [story.parameter("words.weight", HALF), story.given("int64")], HALF
    )
    seen = story.run(
        "aten.mm.default", "eye.project", [story.tensor(tower), story.parameter("eye.project.weight", tower)], tower
    )
    if tower == HALF:
        story.run("aten.index_put_.default", "", [words, story.tensor("bool"), seen], HALF, like=words, inplace=True)
        return story.build()
    message = "Index put requires the source and destination dtypes match, got BFloat16 for the destination and Float for the source."
    story.refuse("aten.index_put_.default", "", [words, story.tensor("bool"), seen], message, inplace=True)
    return story.ended()


def recompute(*, again: str | None) -> Trace:
    """A product in a region, done again in the backward pass inside the same region or outside of any."""
    story = Story().body(F32)
    x, weight = story.tensor(HALF), story.parameter("clip.weight", F32)
    cast = story.run("aten._to_copy.default", "clip", [weight], HALF, autocast=HALF)
    story.run("aten.mm.default", "clip", [x, cast], HALF, autocast=HALF)
    if again is not None:
        story.run("aten.mm.default", "clip", [x, cast], HALF, autocast=again, phase="recompute")
        return story.build()
    story.refuse("aten.mm.default", "clip", [x, weight], PRODUCT, phase="recompute", modules=["clip"])
    return story.ended()


def decomposition(*, runs: bool) -> Trace:
    """A decomposition that half precision is refused by, of a matrix that has one in float32, or has none there either."""
    story = Story().body()
    weight = story.parameter("turn.weight", HALF)
    op = story.refuse("aten.linalg_qr.default", "turn", [weight], "\"geqrf_cpu\" not implemented for 'BFloat16'")
    note = "" if runs else "linalg.qr: the input is empty"
    story.add(Replay(n=story.n(), of=op.n, how="all-as-float32", finite=True, absmax=1.0, note=note, dtype=F32))
    return story.ended()


def shards(*, mixed: bool) -> Trace:
    """A shard unit with parameters of one dtype or of two."""
    story = Story().body()
    names = {HALF: ["block.linear.weight"]} | ({F32: ["block.norm.weight"]} if mixed else {})
    story.saw("shard-unit", "block", root=0, dtypes=names, output_dtype=None)
    if not mixed:
        return story.build()
    message = "FSDP expects uniform original parameter dtype but got {torch.float32, torch.bfloat16}"
    return story.raised(message, kind="AssertionError", modules=["", "block"]).ended()


EXAMPLES: dict[str, Example] = {
    "operand-dtype-mismatch": Example(
        fires=lambda: embedding(dtype=F32), silent=lambda: embedding(dtype=HALF), fqn="words", reason="embedding"
    ),
    "autocast-bypass": Example(fires=lambda: bypass(inside=HALF), silent=lambda: bypass(inside=None), fqn="side", reason="inplace"),
    "autocast-contradicts-model": Example(
        fires=lambda: contradiction(weights=HALF), silent=lambda: contradiction(weights=F32), fqn=None, confidence="likely"
    ),
    "quant-state-dtype": Example(
        fires=lambda: quant_state(state="float16"), silent=lambda: quant_state(state=HALF), fqn="wide", reason="quant-state"
    ),
    "stale-dequant-buffer": Example(
        fires=lambda: stale_buffer(memory=HALF), silent=lambda: stale_buffer(memory="float16"), fqn="wide", reason="reinterpreted"
    ),
    "packed-weight-used-as-dense": Example(
        fires=lambda: used_as_dense(unpacked=False), silent=lambda: used_as_dense(unpacked=True), fqn="mixer",
        reason="quant-state", confidence="likely",
    ),
    "norm-promotes-to-float32": Example(
        fires=lambda: norm(casts_back=False), silent=lambda: norm(casts_back=True), fqn="norm", reason="norm"
    ),
    "buffer-promotes-to-float32": Example(
        fires=lambda: buffer(dtype=F32), silent=lambda: buffer(dtype=HALF), fqn="prepare", reason="buffer"
    ),
    "adapter-dtype-mismatch": Example(
        fires=lambda: adapter(cast=False), silent=lambda: adapter(cast=True), fqn="wrapped.down", reason="adapter"
    ),
    "head-dtype-mismatch": Example(fires=lambda: head(dtype=F32), silent=lambda: head(dtype=HALF), fqn="answer", reason="load-dtype"),
    "attention-dtype-mismatch": Example(
        fires=lambda: attention(tables=F32), silent=lambda: attention(tables=HALF), fqn="attend", reason="buffer"
    ),
    "kv-cache-dtype": Example(fires=lambda: cache(dtype="float16"), silent=lambda: cache(dtype=HALF), fqn="block", reason="cache"),
    "merge-dtype-mismatch": Example(fires=lambda: merge(tower=F32), silent=lambda: merge(tower=HALF), fqn="", reason="load-dtype"),
    "model-input-dtype": Example(
        fires=lambda: model_input(dtype=F32), silent=lambda: model_input(dtype=HALF), fqn="body", reason="model-input"
    ),
    "custom-function-autocast": Example(
        fires=lambda: custom_function(decorated=False), silent=lambda: custom_function(decorated=True), fqn="gate",
        reason="custom-fwd",
    ),
    "recompute-dtype-mismatch": Example(fires=lambda: recompute(again=None), silent=lambda: recompute(again=HALF), fqn="clip"),
    "unsupported-dtype": Example(
        fires=lambda: decomposition(runs=True), silent=lambda: decomposition(runs=False), fqn="turn", reason="load-dtype"
    ),
    "fsdp-mixed-dtypes": Example(
        fires=lambda: shards(mixed=True), silent=lambda: shards(mixed=False), fqn="block", confidence="likely"
    ),
    "autocast-wrong-device": Example(
        fires=lambda: wrong_device(device="cuda"), silent=lambda: wrong_device(device="cpu"), fqn="body", reason="model-input"
    ),
}  # fmt: skip
"""By finding id."""
