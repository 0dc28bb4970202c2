"""Packed weights whose dtypes contradict each other or the model."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from dtypedoctor.diagnosis.finding import Confidence, Finding, Severity
from dtypedoctor.diagnosis.rule import Rule
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.subject import QuantState, Subject, plain_dtype
from dtypedoctor.diagnosis.wording import listed, module_of
from dtypedoctor.rules.mismatch.rule import OPERAND_DTYPE_MISMATCH, QUANT_STATE_DTYPE

STATE = "quant-state-dtype"
FLOAT16_ONLY = frozenset({"awq", "gptq"})


def check_quantised(subject: Subject) -> Iterator[Finding]:
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
    said = Statement(
        id=STATE,
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        summary=f"{len(odd)} packed weight(s) dequantise to {first.dtype} in a model of {target}.",
        cause=f"A packed weight comes back in quant_state.dtype, whatever the model's dtype is. Fused kernels that multiply it "
        f"with {target} activations raise without autocast; under autocast the mismatch stays hidden in the forward pass.",
        evidence=tuple(_state_evidence(subject, odd, target)),
    )
    yield located(said, phase="static", fqn=module_of(first.weight), dtype=first.dtype)


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
        said = Statement(
            id=STATE,
            severity=Severity.INFO,
            confidence=Confidence.LIKELY,
            summary=f"Packed weights dequantise to {state.dtype} and are multiplied in {compute}.",
            cause="bitsandbytes' own modules cast the weight once more. Fused kernels that take it as it comes back do not, and "
            "raise or compute on bits of the wrong format.",
            evidence=(f"{state.weight}: quant_state.dtype is {state.dtype}, compute_dtype is {compute}.",),
        )
        yield located(said, phase="static", fqn=module_of(state.weight), dtype=state.dtype)
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
    said = Statement(
        id="operand-dtype-mismatch",
        severity=Severity.WARNING,
        confidence=Confidence.LIKELY,
        summary=f"A {method} checkpoint, whose kernels compute in float16 only, is loaded as {target}.",
        cause=f"{method} kernels take float16 activations. Other dtypes are refused or cast at every layer, and activations of a "
        "model that was trained in bfloat16 may leave float16's range there.",
        evidence=(f"quant_method is {method}; the model is loaded as {target}.",),
    )
    found = located(said, phase="static", dtype=target)
    yield replace(found, references=("https://github.com/vllm-project/vllm/issues/1114", *found.references))


RULES = (Rule(name="packed-weights", specs=(QUANT_STATE_DTYPE, OPERAND_DTYPE_MISMATCH), inspect=check_quantised),)
