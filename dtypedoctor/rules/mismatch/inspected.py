"""Mismatches that a model's files show before it runs: weights kept in float32, packed weights, FSDP units."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace

from dtypedoctor.diagnosis.finding import Confidence, Finding, Severity
from dtypedoctor.diagnosis.rule import Rule
from dtypedoctor.diagnosis.statement import Statement, make_finding
from dtypedoctor.diagnosis.subject import QuantState, StaticTensor, Subject, plain_dtype
from dtypedoctor.diagnosis.wording import listed, module_of
from dtypedoctor.dtypes import HALF
from dtypedoctor.rules.mismatch.rule import (
    FSDP_MIXED_DTYPES,
    NORM_PROMOTES_TO_FLOAT32,
    OPERAND_DTYPE_MISMATCH,
    QUANT_STATE_DTYPE,
)


def check_kept(subject: Subject) -> Iterator[Finding]:
    """Which tensors the model's class keeps in float32: what they touch may be float32 too."""
    target = subject.load_dtype
    if target not in HALF or subject.quant_states:
        return
    kept = [
        t
        for t in subject.floating
        if (subject.loaded or subject.keeps(t, target)) and _stays_float32(subject, t, target)
    ]
    if not kept:
        return
    why = "the model's class lists them to be kept so" if not subject.loaded else "they are so in memory"
    statement = Statement(
        id=NORM_PROMOTES_TO_FLOAT32.id,
        severity=Severity.INFO,
        confidence=Confidence.POSSIBLE,
        summary=f"{len(kept)} tensor(s) stay float32 in a {target} model.",
        cause=f"A float32 weight can make a module's output float32, at which the next {target} layer raises without autocast. "
        f"They are float32 because {why}.",
        evidence=(f"They are {listed([tensor.name for tensor in kept])}.", *_keep_lists(subject)),
    )
    yield make_finding(statement, phase="static", dtype="float32")


def _stays_float32(subject: Subject, tensor: StaticTensor, target: str) -> bool:
    return subject.in_memory(tensor) == "float32" and target != "float32" and not tensor.name.endswith("inv_freq")


def _keep_lists(subject: Subject) -> Iterator[str]:
    for attribute, modules in subject.keep_in_fp32.items():
        yield f"{attribute} of {subject.config.get('model_type')} holds {', '.join(modules)}."


FLOAT16_ONLY = frozenset({"awq", "gptq"})


def check_quantized(subject: Subject) -> Iterator[Finding]:
    """``quant_state.dtype`` against the model's and the compute dtype, and kernels that know float16 only."""
    yield from _states(subject)
    yield from _float16_kernels(subject)


def _states(subject: Subject) -> Iterator[Finding]:
    target = subject.load_dtype
    odd = [state for state in subject.quant_states if target is not None and state.dtype != target]
    if not odd:
        yield from _computing(subject)
        return
    first = odd[0]
    statement = Statement(
        id=QUANT_STATE_DTYPE.id,
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        summary=f"{len(odd)} packed weight(s) dequantize to {first.dtype} in a model of {target}.",
        cause=f"A packed weight comes back in quant_state.dtype, whatever the model's dtype is. Fused kernels that multiply it "
        f"with {target} activations raise without autocast; under autocast the mismatch stays hidden in the forward pass.",
        evidence=tuple(_state_evidence(subject, odd, target)),
    )
    yield make_finding(statement, phase="static", fqn=module_of(first.weight), dtype=first.dtype)


def _state_evidence(subject: Subject, odd: list[QuantState], target: str | None) -> Iterator[str]:
    counts = Counter(state.dtype for state in subject.quant_states)
    yield (
        "quant_state.dtype: "
        + ", ".join(f"{dtype} in {count}" for dtype, count in counts.most_common())
        + " weight(s)."
    )
    yield f"The model is loaded as {target}; {listed([state.weight for state in odd])} are not."
    compute = {state.compute_dtype or _compute_dtype(subject) for state in odd} - {None}
    if compute:
        yield f"compute_dtype is {', '.join(sorted(filter(None, compute)))}."


def _computing(subject: Subject) -> Iterator[Finding]:
    """The module computes in another dtype than its weight comes back in, which costs a cast of the weight in each call."""
    for state in subject.quant_states:
        compute = state.compute_dtype or _compute_dtype(subject)
        if compute is None or compute == state.dtype:
            continue
        statement = Statement(
            id=QUANT_STATE_DTYPE.id,
            severity=Severity.INFO,
            confidence=Confidence.LIKELY,
            summary=f"Packed weights dequantize to {state.dtype} and are multiplied in {compute}.",
            cause="bitsandbytes' own modules cast the weight once more. Fused kernels that take it as it comes back do not, and "
            "raise or compute on bits of the wrong format.",
            evidence=(f"{state.weight}: quant_state.dtype is {state.dtype}, compute_dtype is {compute}.",),
        )
        yield make_finding(statement, phase="static", fqn=module_of(state.weight), dtype=state.dtype)
        return


def _compute_dtype(subject: Subject) -> str | None:
    settings = subject.config.get("quantization_config")
    return plain_dtype(settings.get("bnb_4bit_compute_dtype")) if isinstance(settings, dict) else None


def _float16_kernels(subject: Subject) -> Iterator[Finding]:
    settings = subject.config.get("quantization_config")
    method = str(settings.get("quant_method", "")).lower() if isinstance(settings, dict) else ""
    target = subject.load_dtype
    if method not in FLOAT16_ONLY or target in (None, "float16"):
        return
    statement = Statement(
        id=OPERAND_DTYPE_MISMATCH.id,
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        summary=f"A {method} checkpoint, whose kernels compute in float16 only, is loaded as {target}.",
        cause=f"{method} kernels take float16 activations. Other dtypes raise or are cast at every layer, and activations of a "
        "model that was trained in bfloat16 may leave float16's range there.",
        evidence=(f"quant_method is {method}; the model is loaded as {target}.",),
    )
    found = make_finding(statement, phase="static", dtype=target)
    yield replace(found, references=("https://github.com/vllm-project/vllm/issues/1114", *found.references))


def check_sharding(subject: Subject) -> Iterator[Finding]:
    """Mixed units: an error where the model is to be sharded, else worth knowing."""
    wanted = subject.intent.fsdp
    mixed = {unit: dtypes for unit, dtypes in _units(subject).items() if len(dtypes) > 1}
    if not mixed:
        return
    unit, dtypes = next(iter(mixed.items()))
    statement = Statement(
        id=FSDP_MIXED_DTYPES.id,
        severity=Severity.ERROR if wanted else Severity.INFO,
        confidence=Confidence.LIKELY if wanted else Confidence.POSSIBLE,
        summary=f"{len(mixed)} unit(s) hold parameters of several dtypes, which FSDP does not shard together.",
        cause="FSDP1 flattens a unit's parameters into one tensor, and FSDP2 gathers them as one: both need one dtype in each "
        "unit. The packed bytes of 4-bit weights count with their storage dtype.",
        evidence=tuple(_sharding_evidence(unit, dtypes)),
    )
    yield make_finding(statement, phase="static", fqn=unit)


def _sharding_evidence(unit: str, dtypes: dict[str, list[StaticTensor]]) -> Iterator[str]:
    for dtype, tensors in sorted(dtypes.items(), key=lambda item: -len(item[1])):
        names = [tensor.name.removeprefix(f"{unit}.") for tensor in tensors]
        yield f"{unit or 'Outside of all layers'}: {len(tensors)} tensor(s) are {dtype}: {listed(names)}."


def _units(subject: Subject) -> dict[str, dict[str, list[StaticTensor]]]:
    """Parameters by unit and dtype. A unit is a repeated layer, as wrapping policies take them; the rest is one more."""
    units: dict[str, dict[str, list[StaticTensor]]] = defaultdict(lambda: defaultdict(list))
    for tensor in subject.tensors:
        if not tensor.name.endswith("inv_freq"):
            units[_unit_of(tensor.name)][subject.in_memory(tensor)].append(tensor)
    return units


def _unit_of(name: str) -> str:
    """The name up to its first number: ``model.layers.3`` of ``model.layers.3.mlp.up_proj.weight``."""
    parts = name.split(".")
    first = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[: first + 1]) if first is not None else ""


RULES = (
    Rule(name="kept-weights", specs=(NORM_PROMOTES_TO_FLOAT32,), inspect=check_kept),
    Rule(name="packed-weights", specs=(QUANT_STATE_DTYPE, OPERAND_DTYPE_MISMATCH), inspect=check_quantized),
    Rule(name="shard-units", specs=(FSDP_MIXED_DTYPES,), inspect=check_sharding),
)
