"""The mismatch family: every spec, the order in which explanations are tried, and what a model's files show before it runs."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from dtypedoctor.diagnosis.checkpoint import QuantState, Subject, plain_dtype
from dtypedoctor.diagnosis.rule import DTYPE_MISMATCH, OF_ANY_FINDING, Confidence, Finding, FindingSpec, Rule, Severity
from dtypedoctor.diagnosis.wording import (
    Complaint,
    complaint_of,
    failing_line,
    how_the_run_ended,
    is_own_statement,
    listed,
    module_of,
    short,
)
from dtypedoctor.dtypes import HALF, WHOLE
from dtypedoctor.rules import Statement, make_finding
from dtypedoctor.rules.mismatch.case import Case, Verdict, case_of, finding
from dtypedoctor.rules.mismatch.operands import (
    NO_COMPLEX,
    NO_SHORT,
    attention_operands,
    by_origin,
    cache_of_another_dtype,
    context_without_region,
    merged_features,
    mixed_shard_units,
    recomputed_outside_of_the_region,
    recomputed_with_other_dtypes,
    without_implementation,
)
from dtypedoctor.rules.mismatch.packed import (
    dequantized_to_another_dtype,
    packed_weight_used_as_dense,
    silently_wrong_weights,
    stale_buffer,
)
from dtypedoctor.rules.mismatch.regions import (
    autocast_bypass,
    contradicted_by,
    contradicting_region,
    custom_function,
    region_without_effect,
    wrong_device,
)
from dtypedoctor.trace.events import Raised
from dtypedoctor.trace.model import Trace

_EXPECTS = re.compile(r"\bexpects (\w+) and gets (\w+)\.")


def _instead(finding: Finding) -> str:
    """What to do where an operator wants whole numbers, as for indices, or has no complex ones; empty where operands have to agree."""
    if finding.cause == NO_COMPLEX:
        return (
            f"Keep complex tensors out of `{finding.op}`: give it `torch.view_as_real(x)`, which shares their memory."
        )
    if finding.cause == NO_SHORT:
        return f"Give `{finding.op}` its indices in int64: `ids.long()`."
    expects = _EXPECTS.search(finding.summary)
    if expects is None:
        return ""
    wanted, found = expects.groups()
    operator = f"`{finding.op}`" if finding.op else "the operator"
    return f"Cast the {found} operand of {operator} to {wanted}, or make it in that dtype."


OPERAND_DTYPE_MISMATCH = FindingSpec(
    id="operand-dtype-mismatch",
    title="An operator was given two dtypes, and no more specific cause was found",
    family=DTYPE_MISMATCH,
    references=("https://github.com/unslothai/unsloth/issues/4970",),
    ablations=("autocast-off", *OF_ANY_FINDING),
    do_this="Give all operands of `{op}` one dtype: cast the {dtype} one to {other}.",
    instead=_instead,
    edits=("make-in-dtype", "cast-where-set", "cast-met-weights", "cast-operand", "autocast-around"),
)
QUANT_STATE_DTYPE = FindingSpec(
    id="quant-state-dtype",
    title="A quantized weight dequantizes to another dtype than the activations have",
    family=DTYPE_MISMATCH,
    references=(
        "https://github.com/unslothai/unsloth/pull/4005",
        "https://github.com/axolotl-ai-cloud/axolotl/pull/3799",
    ),
    do_this="Quantize and compute in one dtype: `quant_state.dtype` is what the weight unpacks to.",
    edits=("half-to-bfloat16",),
)
NORM_PROMOTES_TO_FLOAT32 = FindingSpec(
    id="norm-promotes-to-float32",
    title="A norm with a float32 weight returned float32 into a half-precision model",
    family=DTYPE_MISMATCH,
    references=(
        "https://github.com/NVIDIA-NeMo/Automodel/pull/1633",
        "https://github.com/NVIDIA-NeMo/Automodel/issues/1540",
    ),
    ablations=("autocast-off", *OF_ANY_FINDING),
    do_this="Cast the output of the norm back to the dtype of its input ({other}), in {alike}: the {dtype} weight promotes it.",
    edits=("cast-promoted-output", "cast-weights-where-set"),
)


FSDP_MIXED_DTYPES = FindingSpec(
    id="fsdp-mixed-dtypes",
    title="One FSDP unit holds parameters of several dtypes",
    family=DTYPE_MISMATCH,
    references=(
        "https://github.com/axolotl-ai-cloud/axolotl/issues/1494",
        "https://github.com/huggingface/accelerate/pull/3985",
    ),
    do_this="Give the {dtype} modules of {module} a shard unit of their own, before {module} is sharded; or give all parameters of it one dtype.",
    edits=("shard-apart",),
)

SPECS = (
    OPERAND_DTYPE_MISMATCH,
    FindingSpec(
        id="autocast-bypass",
        title="An in-place or out= operator kept its own dtype inside an autocast region",
        family=DTYPE_MISMATCH,
        references=(
            "https://github.com/unslothai/unsloth/pull/4918",
            "https://github.com/linkedin/Liger-Kernel/issues/501",
        ),
        remedies=("autocast-off",),
        settled_by=("autocast-off",),
        ablations=("autocast-off", *OF_ANY_FINDING),
        needs="autocast-off",
        needs_only=True,
        do_this="Autocast does not cast for an in-place or `out=` operator: cast what `{op}` in {module} is given to the dtype of the tensor that it writes to.",
        edits=("cast-operand",),
    ),
    FindingSpec(
        id="autocast-contradicts-model",
        title="The autocast dtype is not the half-precision dtype of the model's weights",
        family=DTYPE_MISMATCH,
        references=("https://github.com/unslothai/unsloth/pull/7534", "https://github.com/OpenPipe/ART/pull/663"),
        remedies=("autocast-dtype-of-model", "autocast-off"),
        settled_by=("autocast-dtype-of-model",),
        supported_by=("autocast-off",),
        ablations=("autocast-off", *OF_ANY_FINDING),
        needs="autocast-off",
        do_this="Give the autocast region the dtype of the model's weights ({other}).",
        edits=("weights-to-float32",),
    ),
    QUANT_STATE_DTYPE,
    FindingSpec(
        id="stale-dequant-buffer",
        title="A dequantization buffer shared by two models still has the first one's dtype",
        family=DTYPE_MISMATCH,
        references=("https://github.com/unslothai/unsloth/pull/4026",),
        remedies=("fresh-process",),
        settled_by=("fresh-process",),
        do_this="Give the buffer the dtype as a part of its key; until then, use one dtype for all models of a process.",
        edits=("half-to-bfloat16",),
    ),
    FindingSpec(
        id="packed-weight-used-as-dense",
        title="A packed integer weight was used as if it were the matrix itself",
        family=DTYPE_MISMATCH,
        references=(
            "https://github.com/huggingface/peft/issues/156",
            "https://github.com/bitsandbytes-foundation/bitsandbytes/issues/963",
        ),
        do_this="Call the quantized layer, `layer(x)`, in the place of computing with its weight, or leave that layer unpacked.",
        edits=("plain-linear-only", "dequantized-weights"),
    ),
    NORM_PROMOTES_TO_FLOAT32,
    FindingSpec(
        id="buffer-promotes-to-float32",
        title="A registered float32 buffer promoted half-precision activations",
        family=DTYPE_MISMATCH,
        references=("https://github.com/NVIDIA-NeMo/Automodel/pull/2419",),
        ablations=("autocast-off", *OF_ANY_FINDING),
        do_this="Cast the buffer to the dtype of the activations ({other}), where it is registered or where it is used.",
        edits=("cast-where-set", "cast-operand"),
    ),
    FindingSpec(
        id="adapter-dtype-mismatch",
        title="Adapter weights and base activations have different dtypes and nothing casts between them",
        family=DTYPE_MISMATCH,
        references=(
            "https://github.com/huggingface/peft/issues/1872",
            "https://github.com/huggingface/peft/issues/1515",
        ),
        ablations=("autocast-off", *OF_ANY_FINDING),
        do_this="Give the adapter {module} the dtype of the activations ({other}), or cast its input to {dtype} and its output back.",
        edits=("autocast-around", "cast-where-set", "cast-operand"),
    ),
    FindingSpec(
        id="head-dtype-mismatch",
        title="The output head has another dtype than the hidden states it receives",
        family=DTYPE_MISMATCH,
        references=("https://github.com/huggingface/trl/issues/4634",),
        ablations=("autocast-off", *OF_ANY_FINDING),
        do_this="Cast the input of {module} to the dtype of its weight, which keeps the logits in that dtype.",
        edits=("cast-operand", "cast-weights-where-set", "autocast-around"),
    ),
    FindingSpec(
        id="attention-dtype-mismatch",
        title="Query, key, value or mask reach attention in different or unsupported dtypes",
        family=DTYPE_MISMATCH,
        references=(
            "https://github.com/unslothai/unsloth-zoo/pull/509",
            "https://github.com/hiyouga/LlamaFactory/issues/539",
        ),
        ablations=("autocast-off", *OF_ANY_FINDING),
        do_this="Cast query, key, value and mask of the attention in {module} to one dtype.",
        edits=("cast-operand", "cast-weights-where-set", "autocast-around"),
    ),
    FindingSpec(
        id="kv-cache-dtype",
        title="The key/value cache was allocated in another dtype than the keys that go into it",
        family=DTYPE_MISMATCH,
        references=(
            "https://github.com/huggingface/transformers/issues/39686",
            "https://github.com/unslothai/unsloth-zoo/pull/424",
        ),
        ablations=("autocast-off", *OF_ANY_FINDING),
        do_this="Allocate the KV cache of {module} in the dtype that the layers compute in, or cast what is written to it.",
        edits=("make-in-dtype", "cast-met-weights", "half-to-bfloat16", "cast-operand"),
    ),
    FindingSpec(
        id="merge-dtype-mismatch",
        title="Features are merged into a tensor of another dtype through an indexed write",
        family=DTYPE_MISMATCH,
        aliases=("scatter-dtype-mismatch",),
        references=(
            "https://github.com/huggingface/transformers/issues/47689",
            "https://github.com/hiyouga/LlamaFactory/issues/3807",
        ),
        do_this="Cast the features to the dtype of the tensor that they are written into.",
        edits=("cast-operand",),
    ),
    FindingSpec(
        id="model-input-dtype",
        title="The batch itself has a dtype that the model's first layer does not accept",
        family=DTYPE_MISMATCH,
        references=("https://github.com/kadirnar/whisper-plus/issues/58",),
        ablations=("autocast-off", *OF_ANY_FINDING),
        do_this="Cast the input to {other} before the call.",
        edits=("cast-operand", "autocast-around"),
    ),
    FindingSpec(
        id="custom-function-autocast",
        title="A custom autograd function runs its backward under another autocast state than its tensors expect",
        family=DTYPE_MISMATCH,
        references=(
            "https://github.com/unslothai/unsloth/pull/7020",
            "https://github.com/axolotl-ai-cloud/axolotl/pull/3805",
        ),
        ablations=("autocast-off", *OF_ANY_FINDING),
        needs="autocast-off",
        do_this="Decorate the custom function's forward with `torch.amp.custom_fwd` and its backward with `torch.amp.custom_bwd`, both for the device that the tensors are on.",
        edits=("region-on-device", "custom-function-decorators", "bfloat16-to-float32"),
    ),
    FindingSpec(
        id="recompute-dtype-mismatch",
        title="Gradient checkpointing recomputed activations in another dtype than the forward had",
        family=DTYPE_MISMATCH,
        references=(
            "https://github.com/pytorch/pytorch/issues/148831",
            "https://github.com/NVIDIA-NeMo/Automodel/pull/3504",
        ),
        ablations=("autocast-off", *OF_ANY_FINDING),
        do_this="Recompute under the same autocast region and default dtype as the forward pass.",
        edits=("bfloat16-to-float32",),
    ),
    FindingSpec(
        id="unsupported-dtype",
        title="An operator is not implemented for half precision",
        family=DTYPE_MISMATCH,
        references=(
            "https://github.com/huggingface/transformers/issues/47225",
            "https://github.com/huggingface/peft/pull/3410",
            "https://github.com/HomebrewML/HeavyBall/issues/57",
        ),
        do_this="Cast the operands of `{op}` in {module} to float32, and its result back where what follows needs that: `f(x.float()).to(x.dtype)`.",
        instead=_instead,
        edits=("in-wider-dtype",),
    ),
    FSDP_MIXED_DTYPES,
    FindingSpec(
        id="autocast-wrong-device",
        title="The autocast region is for another device than the tensors are on",
        family=DTYPE_MISMATCH,
        severity=Severity.WARNING,
        references=("https://github.com/huggingface/transformers/issues/32648",),
        ablations=("autocast-off", *OF_ANY_FINDING),
        do_this="Name the device that the tensors are on in `torch.autocast`.",
        edits=("region-on-device",),
    ),
)


CHECKS: tuple[Callable[[Case], Verdict | None], ...] = (
    packed_weight_used_as_dense,
    recomputed_outside_of_the_region,
    stale_buffer,
    dequantized_to_another_dtype,
    cache_of_another_dtype,
    custom_function,
    without_implementation,
    autocast_bypass,
    merged_features,
    wrong_device,
    attention_operands,
    by_origin,
)
"""In this order: what is wrong with the operand itself or with each dtype that it may have, then what the region did or did not do, then where it came from."""

WITH_WHOLE = (packed_weight_used_as_dense, by_origin)
"""What may be wrong where whole numbers meet floating-point ones: autocast casts neither of them to the other."""
WITHOUT_COMPLAINT = (packed_weight_used_as_dense, without_implementation)
"""What may be wrong where operands have one dtype, and the message does not speak of dtypes."""

OF_A_REGION = frozenset({"autocast-bypass", "custom-function-autocast"})
"""Findings that an autocast region in the model's own dtype would not have led to."""

SPOKEN_FOR = frozenset({"recompute", "shards"})
"""Families of complaints with detectors of their own."""


def detect_mismatch(trace: Trace) -> Iterator[Finding]:
    """Everything about dtypes that do not go together, the root before its consequences."""
    explained = tuple(_rejection(trace))
    ids = {finding.id for finding in explained}
    yield from explained
    yield from context_without_region(trace)
    yield from recomputed_with_other_dtypes(trace)
    yield from mixed_shard_units(trace)
    if ids.isdisjoint(("stale-dequant-buffer", "quant-state-dtype")):
        yield from silently_wrong_weights(trace)
    if "autocast-contradicts-model" not in ids:
        yield from contradicting_region(trace)
    if "autocast-wrong-device" not in ids:
        yield from region_without_effect(trace)


def _rejection(trace: Trace) -> Iterator[Finding]:
    """What explains the exception that ended the run; from its message alone, where no op trace was open."""
    raised = trace.last(Raised)
    complaint = complaint_of(raised.message) if raised is not None else None
    if raised is None or (complaint is not None and complaint.family in SPOKEN_FOR):
        return
    case = case_of(trace)
    if case is None:
        if complaint is not None and not is_own_statement(raised):
            yield _by_message(trace, raised, complaint, _NOT_TRACED)
        return

    # Packed bytes may have a wrong shape first of all
    about_dtypes = CHECKS if complaint is not None or len(case.dtypes) > 1 else WITHOUT_COMPLAINT
    checks = WITH_WHOLE if case.whole else about_dtypes
    verdict = next((verdict for check in checks if (verdict := check(case)) is not None), None)
    if verdict is None:
        if complaint is not None:
            yield _by_message(trace, raised, complaint, _UNEXPLAINED)
        return

    # The contradiction between model and region comes before what follows from it
    found = finding(case, verdict)
    root = contradicted_by(case) if verdict.id in OF_A_REGION else None
    if root is not None:
        yield root
        found = replace(found, consequence_of=root.id)
    yield found


_NOT_TRACED = "The message says so; no op trace shows the operands, so where the odd one comes from is not known."
_UNEXPLAINED = "The message says so; what the op trace shows of the operands explains it no further."


def _by_message(trace: Trace, raised: Raised, complaint: Complaint, cause: str) -> Finding:
    """What the exception alone says, where no op trace was open, or none of the checks knows what it shows."""
    module = raised.modules[-1] if raised.modules else None
    gets = f"got {' and '.join(complaint.dtypes) or 'different dtypes'}"
    dtype = next(iter(complaint.dtypes), None)
    # An operator that wants whole numbers, or the other way round, names what it wants before what it got
    if (
        "expected scalar type" in raised.message
        and len(complaint.dtypes) > 1
        and not WHOLE.isdisjoint(complaint.dtypes)
    ):
        wanted, dtype = complaint.dtypes[:2]
        gets = f"expects {wanted} and gets {dtype}"
    statement = Statement(
        id="operand-dtype-mismatch",
        confidence=Confidence.POSSIBLE,
        summary=f"{raised.op or 'An operation'} in {short(module)} {gets}.",
        cause=cause,
        evidence=how_the_run_ended(trace),
    )
    return make_finding(
        statement,
        phase=raised.phase,
        step=raised.step,
        fqn=module,
        op=raised.op,
        dtype=dtype,
        source=failing_line(raised),
    )


def check_kept(subject: Subject) -> Iterator[Finding]:
    """Which tensors the model's class keeps in float32: what they touch may be float32 too."""
    target = subject.load_dtype
    if target not in HALF or subject.quant_states:
        return
    kept = [
        t.name
        for t in subject.floating
        if (subject.loaded or subject.keeps(t, target))
        and subject.in_memory(t) == "float32"
        and not t.name.endswith("inv_freq")
    ]
    if not kept:
        return
    why = "the model's class lists them to be kept so" if not subject.loaded else "they are so in memory"
    model = subject.config.get("model_type")
    statement = Statement(
        id=NORM_PROMOTES_TO_FLOAT32.id,
        severity=Severity.INFO,
        confidence=Confidence.POSSIBLE,
        summary=f"{len(kept)} tensor(s) stay float32 in a {target} model.",
        cause=f"A float32 weight can make a module's output float32, at which the next {target} layer raises without autocast. "
        f"They are float32 because {why}.",
        evidence=(
            f"They are {listed(kept)}.",
            *(f"{attribute} of {model} holds {', '.join(names)}." for attribute, names in subject.keep_in_fp32.items()),
        ),
    )
    yield make_finding(statement, phase="static", dtype="float32")


FLOAT16_ONLY = frozenset({"awq", "gptq"})


def check_quantized(subject: Subject) -> Iterator[Finding]:
    """``quant_state.dtype`` against the model's and the compute dtype, and kernels that know float16 only."""
    target = subject.load_dtype
    settings = subject.config.get("quantization_config")
    settings = settings if isinstance(settings, dict) else {}
    configured = plain_dtype(settings.get("bnb_4bit_compute_dtype"))
    computed = {state: state.compute_dtype or configured for state in subject.quant_states}
    unlike_model = {state: dtype for state, dtype in computed.items() if target is not None and state.dtype != target}
    if unlike_model:
        yield _unlike_model(unlike_model, subject, str(target))
    else:
        yield from _unlike_computed(computed)

    method = str(settings.get("quant_method", "")).lower()
    if method in FLOAT16_ONLY and target not in (None, "float16"):
        statement = Statement(
            id=OPERAND_DTYPE_MISMATCH.id,
            severity=Severity.WARNING,
            summary=f"A {method} checkpoint, whose kernels compute in float16 only, is loaded as {target}.",
            cause=f"{method} kernels take float16 activations. Other dtypes raise or are cast at every layer, and activations of a "
            "model that was trained in bfloat16 may leave float16's range there.",
            evidence=(f"quant_method is {method}; the model is loaded as {target}.",),
        )
        found = make_finding(statement, phase="static", dtype=target)
        yield replace(found, references=("https://github.com/vllm-project/vllm/issues/1114", *found.references))


def _unlike_model(odd: Mapping[QuantState, str | None], subject: Subject, target: str) -> Finding:
    """Packed weights come back in another dtype than the model is loaded in; ``odd`` gives what each computes in."""
    first = next(iter(odd))
    counts = Counter(state.dtype for state in subject.quant_states).most_common()
    compute = ", ".join(sorted({dtype for dtype in odd.values() if dtype is not None}))
    statement = Statement(
        id=QUANT_STATE_DTYPE.id,
        severity=Severity.WARNING,
        summary=f"{len(odd)} packed weight(s) dequantize to {first.dtype} in a model of {target}.",
        cause=f"A packed weight comes back in quant_state.dtype, whatever the model's dtype is. Fused kernels that multiply it "
        f"with {target} activations raise without autocast; under autocast the mismatch stays hidden in the forward pass.",
        evidence=(
            f"quant_state.dtype: {', '.join(f'{dtype} in {count}' for dtype, count in counts)} weight(s).",
            f"The model is loaded as {target}; {listed([state.weight for state in odd])} are not.",
            *((f"compute_dtype is {compute}.",) if compute else ()),
        ),
    )
    return make_finding(statement, phase="static", fqn=module_of(first.weight), dtype=first.dtype)


def _unlike_computed(computed: Mapping[QuantState, str | None]) -> Iterator[Finding]:
    """The module computes in another dtype than its weight comes back in, which costs a cast of the weight in each call."""
    for state, dtype in computed.items():
        if dtype is None or dtype == state.dtype:
            continue
        statement = Statement(
            id=QUANT_STATE_DTYPE.id,
            severity=Severity.INFO,
            summary=f"Packed weights dequantize to {state.dtype} and are multiplied in {dtype}.",
            cause="bitsandbytes' own modules cast the weight once more. Fused kernels that take it as it comes back do not, and "
            "raise or compute on bits of the wrong format.",
            evidence=(f"{state.weight}: quant_state.dtype is {state.dtype}, compute_dtype is {dtype}.",),
        )
        yield make_finding(statement, phase="static", fqn=module_of(state.weight), dtype=state.dtype)
        return


def check_sharding(subject: Subject) -> Iterator[Finding]:
    """Mixed units: an error where the model is to be sharded, else worth knowing."""
    # A unit is a repeated layer, as wrapping policies take them (a name up to its first number); the rest is one more
    units: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for tensor in subject.tensors:
        if not tensor.name.endswith("inv_freq"):
            layer = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", tensor.name)
            units[layer[0] if layer else ""][subject.in_memory(tensor)].append(tensor.name)
    mixed = {unit: dtypes for unit, dtypes in units.items() if len(dtypes) > 1}
    if not mixed:
        return
    unit, dtypes = next(iter(mixed.items()))
    by_size = sorted(dtypes.items(), key=lambda item: -len(item[1]))
    wanted = subject.intent.fsdp
    statement = Statement(
        id=FSDP_MIXED_DTYPES.id,
        severity=Severity.ERROR if wanted else Severity.INFO,
        confidence=Confidence.LIKELY if wanted else Confidence.POSSIBLE,
        summary=f"{len(mixed)} unit(s) hold parameters of several dtypes, which FSDP does not shard together.",
        cause="FSDP1 flattens a unit's parameters into one tensor, and FSDP2 gathers them as one: both need one dtype in each "
        "unit. The packed bytes of 4-bit weights count with their storage dtype.",
        evidence=tuple(
            f"{unit or 'Outside of all layers'}: {len(names)} tensor(s) are {dtype}: {listed([name.removeprefix(f'{unit}.') for name in names])}."
            for dtype, names in by_size
        ),
    )
    yield make_finding(statement, phase="static", fqn=unit)


RULES = (
    Rule(name="mismatch", priority=20, specs=SPECS, detect=detect_mismatch),
    Rule(name="kept-weights", priority=280, specs=(NORM_PROMOTES_TO_FLOAT32,), inspect=check_kept),
    Rule(
        name="packed-weights", priority=240, specs=(QUANT_STATE_DTYPE, OPERAND_DTYPE_MISMATCH), inspect=check_quantized
    ),
    Rule(name="shard-units", priority=260, specs=(FSDP_MIXED_DTYPES,), inspect=check_sharding),
)
