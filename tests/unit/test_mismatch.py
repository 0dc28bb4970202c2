"""Dtypes that do not go together: borders of the findings that recorded runs show, on traces built by hand."""

from dataclasses import replace

import pytest
from refusals import BIASED, HALF, IN_PLACE, PRODUCT, Story

from dtypedoctor.diagnosis import diagnose, spec_of
from dtypedoctor.diagnosis.rule import Confidence
from dtypedoctor.diagnosis.wording import complaint_of, is_dtype_error
from dtypedoctor.rules.mismatch.dtype_origin import Census
from dtypedoctor.rules.mismatch.rule import detect_mismatch
from dtypedoctor.trace.events import Flow, Op, Raised, Replay
from dtypedoctor.trace.model import Trace

F32 = "float32"


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


def packed(story: Story, name: str, dtype: str, *, state: str) -> tuple:
    stored = story.parameter(
        name, "uint8", shape=[8, 1], quant={"kind": "nf4", "dtype": state, "compute_dtype": None, "shape": [4, 4]}
    )
    return stored, story.run("bitsandbytes.dequantize_4bit.default", "fused", [stored, story.tensor(F32)], dtype)


def test_a_region_re_entered_by_the_backward_is_told_from_one_that_was_lost() -> None:
    """custom_bwd restores float16, and the gradient is summed in place into float32 memory."""
    story = Story().body(F32)
    buffer = story.run("aten.empty_like.default", "down", [story.tensor(F32)], F32, phase="backward", function="Fused")
    product = story.tensor("float16")
    story.saw(
        "custom-function", "down", function="Fused", decorated=True, fwd_used_autocast=True, forward_autocast="float16"
    )
    story.refuse("aten.addmm_.default", "down", [buffer, product, product], IN_PLACE, inplace=True, autocast="float16",
                 phase="backward", function="Fused")  # fmt: skip
    (finding,) = detect_mismatch(story.ended())
    assert finding.id == "custom-function-autocast"
    assert "re-enters" in finding.cause


def test_an_activation_of_the_weights_shape_is_no_wrong_weight() -> None:
    """It comes out of a computation, not out of a dequantisation or memory that nobody wrote to."""
    story = Story().body(HALF)
    packed(story, "wide.weight", HALF, state=HALF)
    x = story.run("aten.add.Tensor", "fused", [story.tensor(HALF), story.tensor(HALF)], HALF)
    product = story.op("aten.mm.default", "fused", [x, story.tensor(HALF)], [story.tensor(HALF)])
    story.saw(
        "packed-weight",
        "wide",
        of=product.n,
        operand=0,
        weight="wide.weight",
        dtype=HALF,
        quant_dtype=HALF,
        relative_error=1.4,
    )
    assert list(detect_mismatch(story.build())) == []


def test_a_weight_filled_by_a_kernel_that_nobody_sees_is_known_by_its_values() -> None:
    """New memory without a visible writer that holds what the state says is the dequantised weight."""
    story = Story().body(HALF)
    story.parameter("wide.weight", "uint8", shape=[8, 1], quant={"kind": "nf4", "dtype": "float16", "shape": [4, 4]})
    dense = story.run("aten.empty.memory_format", "fused", [], "float16")
    refused = story.refuse("aten.mm.default", "fused", [story.given(HALF), dense], PRODUCT)
    story.saw("packed-weight", "wide", of=refused.n, operand=1, weight="wide.weight", dtype="float16", quant_dtype="float16",
              relative_error=0.0002)  # fmt: skip
    assert next(detect_mismatch(story.ended())).id == "quant-state-dtype"


def test_without_an_op_trace_the_message_alone_makes_it_possible_and_no_more() -> None:
    """Module and line come from the exception."""
    trace = Story().body().raised(BIASED, modules=["", "encoder", "encoder.query"]).ended()
    (finding,) = detect_mismatch(trace)
    assert (finding.id, finding.confidence, finding.fqn) == (
        "operand-dtype-mismatch",
        Confidence.POSSIBLE,
        "encoder.query",
    )


def test_an_op_that_refuses_shapes_of_one_dtype_is_not_explained() -> None:
    """Dense operands of wrong shapes in a model with packed weights elsewhere."""
    story = Story().body()
    packed(story, "wide.weight", HALF, state=HALF)
    operands = [story.given(HALF), story.parameter("body.weight", HALF, note=False)]
    story.refuse("aten.mm.default", "body", operands, "mat1 and mat2 shapes cannot be multiplied (2x3 and 4x4)")
    assert list(detect_mismatch(story.ended())) == []


def test_a_region_for_the_operands_own_device_is_not_for_another_one() -> None:
    """A disabled region inside it is why nothing is cast."""
    story = Story().body(F32)
    operands = [story.given("float16"), story.parameter("body.weight", F32, note=False)]
    refused = story.refuse("aten.mm.default", "body", operands, PRODUCT)
    regions = [
        {"device": "cpu", "wanted": "float16", "enabled": True, "source": "train.py:3"},
        {"device": "cpu", "wanted": "bfloat16", "enabled": False, "source": "train.py:4"},
    ]
    trace = story.saw("autocast-regions", of=refused.n, device="cpu", regions=regions).ended()
    assert "autocast-wrong-device" not in {found.id for found in detect_mismatch(trace)}


def test_a_region_that_is_entered_around_float32_layers_of_a_half_precision_model_is_no_contradiction() -> None:
    """Only layers in the model's own dtype count."""
    story = Story().body(HALF).saw("autocast-region", device="cpu", wanted="float16", enabled=True, source="train.py:3")
    story.add(Flow(n=story.n(), step=1, call=1, phase="forward", root=0, fqn="router", cls="Linear", inputs=[F32],
                   outputs=["float16"], weights=[F32], autocast="float16"))  # fmt: skip
    assert list(detect_mismatch(story.build())) == []


MESSAGES = [
    (
        "expected mat1 and mat2 to have the same dtype, but got: c10::Half != c10::BFloat16",
        "product",
        ("float16", "bfloat16"),
    ),
    (IN_PLACE, "accumulation", ("float16", "bfloat16")),
    (BIASED, "biased-product", ("float32", "bfloat16")),
    ("expected scalar type Half but found Float", "batched-product", ("float16", "float32")),
    ("Input type (float) and bias type (c10::Half) should be the same", "convolution", ("float32", "float16")),
    (
        "index_add_(): self (Half) and source (Float) must have the same scalar type",
        "index-add",
        ("float16", "float32"),
    ),
    ("Expected out tensor to have dtype float, but got c10::BFloat16 instead", "out", ("float32", "bfloat16")),
    (
        "RNN input dtype (torch.float32) does not match weight dtype (torch.bfloat16).",
        "recurrent",
        ("float32", "bfloat16"),
    ),
    ("input must have the type torch.bfloat16, got type torch.float32", "recurrent", ("float32", "bfloat16")),
    ("expected dtype c10::BFloat16 for `end` but got dtype float", "average", ("bfloat16", "float32")),
    (
        "dot : expected both vectors to have same dtype, but found BFloat16 and Float",
        "vectors",
        ("bfloat16", "float32"),
    ),
    (
        "addmv input tensors must have the same dtype, but got Float, BFloat16, and Float",
        "vectors",
        ("float32", "bfloat16"),
    ),
    ("Found dtype Float but expected BFloat16", "loss", ("float32", "bfloat16")),
    (
        "attempting to assign a gradient with dtype 'float' to a tensor with grad_dtype 'BFloat16'.",
        "gradient",
        ("float32", "bfloat16"),
    ),
    (
        "`unsafe` flag is enabled.\nunparametrized dtype: torch.bfloat16\nparametrized dtype: torch.float32",
        "parametrization",
        ("float32", "bfloat16"),
    ),
    ("expected m1 and m2 to have the same dtype, but got: long int != float", "product", ("int64", "float32")),
    (
        "at first: expected m1 and m2 to have the same dtype, but got: c10::complex<float> != unsigned char",
        "product",
        ("complex64", "uint8"),
    ),
    ("FlashAttention only support fp16 and bf16 data type", "flash-attention", ()),
    ("Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32", "shards", ()),
]


@pytest.mark.parametrize(("message", "family", "dtypes"), MESSAGES, ids=[m[0][:30] for m in MESSAGES])
def test_a_message_gives_the_family_of_the_op_and_the_dtypes(
    message: str, family: str, dtypes: tuple[str, ...]
) -> None:
    """However they are spelt, and whichever version of torch said it."""
    complaint = complaint_of(message)
    assert complaint is not None
    assert (complaint.family, complaint.dtypes) == (family, dtypes)


def test_a_recurrent_layer_that_rejects_its_input_complains_about_dtypes_in_each_version() -> None:
    """torch 2.9 says neither dtype nor scalar type."""
    for message in (said for said, family, _ in MESSAGES if family == "recurrent"):
        place = {"n": 1, "step": 1, "call": 1, "phase": "forward", "frames": [], "modules": []}
        assert is_dtype_error(Raised(type="ValueError", message=message, **place))


def test_what_is_frozen_decides_the_dtype_of_a_model_and_packed_weights_do_not() -> None:
    """Adapters may outnumber the rest; packed storage says nothing about activations."""
    story = Story()
    story.parameter("words.weight", HALF, shape=[4, 4])
    story.parameter("adapter.weight", F32, shape=[64, 64], requires_grad=True)
    packed(story, "wide.weight", "float16", state="float16")
    assert Census(story.build()).dtype_of(0) == HALF


@pytest.mark.parametrize(("again", "found"), [("the same", False), ("another device too", True)])
def test_what_operands_of_one_dtype_are_rejected_for_as_well_is_no_mismatch(again: str, found: bool) -> None:
    """A message about a device or a shape that comes back word for word; another one says nothing about the first."""
    message = (
        "Expected all tensors to be on the same device, but got mat1 is on cpu, different from other tensors on cuda:0"
    )
    note = message if again == "the same" else again

    def told(record: object) -> object:
        if isinstance(record, Replay):
            return replace(record, finite=False, absmax=None, note=note)
        if isinstance(record, Op) and record.error is not None:
            return replace(record, error=message)
        return replace(record, message=message) if isinstance(record, Raised) else record

    trace = norm(casts_back=False)
    trace = replace(trace, records=tuple(map(told, trace.records)))
    assert bool(list(detect_mismatch(trace))) is found


WHOLE = "mat1 and mat2 must have the same dtype, but got Long and Float"


def called_with(dtype: str) -> Story:
    """A float32 model that is called with a tensor of another dtype, which its first product rejects."""
    story = Story().body(F32)
    weight, x = story.parameter("side.weight", F32), story.given(dtype)
    op = story.refuse("aten.addmm.default", "side", [weight, x, weight], WHOLE)
    for how in ("equal-dtypes", "all-as-float32"):
        story.add(Replay(n=story.n(), of=op.n, how=how, finite=True, absmax=1.0, dtype=F32))
    return story


def test_whole_numbers_beside_floating_point_ones_are_a_mismatch() -> None:
    """The input that is not floating point is the odd operand, as the replay with all operands in float32 shows."""
    (finding,) = detect_mismatch(called_with("int64").ended())
    assert (finding.id, finding.dtype, finding.confidence) == ("model-input-dtype", "int64", Confidence.PROVEN)
    assert "gets int64 input where its weights are float32" in finding.summary


def test_an_operator_that_wants_whole_numbers_is_to_get_them() -> None:
    """The message alone says what is expected and what was found, and the advice is to cast to the former."""
    story = Story().raised("expected scalar type Long but found Float")
    (finding,) = detect_mismatch(story.ended())
    assert (finding.id, finding.dtype) == ("operand-dtype-mismatch", F32)
    assert "expects int64 and gets float32." in finding.summary
    instead = spec_of(finding.id).instead
    assert instead is not None
    assert "to int64" in instead(finding)


def test_a_rejection_that_no_check_explains_is_told_by_its_message() -> None:
    """An op trace in which the operands agree explains nothing, and the message still says what the operator rejects."""
    story = Story().body(F32)
    story.refuse("aten.gather.default", "side", [story.given(F32)], "expected scalar type Long but found Float")
    (finding,) = detect_mismatch(story.ended())
    assert (finding.id, finding.confidence) == ("operand-dtype-mismatch", Confidence.POSSIBLE)
    assert "no op trace" not in finding.cause


OF_TORCH = {
    "operands": "expected scalar type Half but found Float",
    "scaler": "Attempting to unscale FP16 gradients.",
    "nothing checked": "No inf checks were recorded for this optimizer.",
    "constant": "value cannot be converted to type at::Half without overflow",
    "minimum": "Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
    "shards": "FSDP expects uniform original parameter dtype but got {torch.float16, torch.float32}",
    "sampler": "probability tensor contains either `inf`, `nan` or element < 0",
}


@pytest.mark.parametrize("message", OF_TORCH.values(), ids=list(OF_TORCH))
def test_what_the_programs_own_raise_says_is_no_evidence(message: str) -> None:
    """A message is one of torch or of a library: the same words in an exception that the program itself raises are its author's."""
    of_torch = Story().body().raised(message).ended()
    assert diagnose(of_torch)
    (raised,) = of_torch.all(Raised)
    own = replace(raised, frames=["/home/me/train.py:12 main"], by_statement=True)
    assert diagnose(replace(of_torch, records=tuple(own if r is raised else r for r in of_torch.records))) == ()


NO_EVIDENCE = {
    "path": ("FileNotFoundError", "[Errno 2] No such file or directory: 'runs/inf/reference.pt'"),
    "archive": ("RuntimeError", "PytorchStreamReader failed reading runs/inf/reference.pt: not a ZIP archive"),
    "word": ("RuntimeError", "an infinite sampler has no length"),
    "key": ("KeyError", "'nan'"),
    "number": ("OverflowError", "cannot convert float infinity to integer"),
    "nan": ("ValueError", "cannot convert float NaN to integer"),
}


@pytest.mark.parametrize(("kind", "message"), NO_EVIDENCE.values(), ids=list(NO_EVIDENCE))
def test_a_word_in_a_message_is_no_value(kind: str, message: str) -> None:
    """A path, a key or an adjective says nothing of values that are not finite, whoever raises."""
    assert diagnose(Story().body().raised(message, kind=kind).ended()) == ()
