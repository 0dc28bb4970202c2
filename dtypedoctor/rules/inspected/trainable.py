"""Trainable parameters that a gradient scaler refuses."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Confidence, Finding, Severity
from dtypedoctor.diagnosis.rule import Rule
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.subject import HALF, StaticTensor, Subject
from dtypedoctor.diagnosis.wording import listed
from dtypedoctor.rules.loss_scaling import SCALER_BFLOAT16, UNSCALE_FLOAT16_GRADIENTS

IDS = {"float16": "unscale-float16-gradients", "bfloat16": "scaler-bfloat16"}
WHY = {
    "float16": "torch.amp.GradScaler raises “Attempting to unscale FP16 gradients.” at the first step.",
    "bfloat16": "On CUDA the scaler's unscale kernel is not implemented for bfloat16 gradients, and raises.",
}


def check_trainable(subject: Subject) -> Iterator[Finding]:
    """Half-precision tensors that will be trained: an error where a scaler is wanted, else worth knowing for adapters."""
    wanted = subject.intent.scaler
    if not wanted and subject.adapter is None:
        return
    for dtype, finding in IDS.items():
        hostile = [tensor for tensor in _trained(subject) if subject.in_memory(tensor) == dtype]
        if hostile:
            said = Statement(
                id=finding,
                severity=Severity.ERROR if wanted else Severity.INFO,
                confidence=Confidence.LIKELY if wanted else Confidence.POSSIBLE,
                summary=f"{len(hostile)} trainable tensor(s) are {dtype}, which a gradient scaler does not take.",
                cause=f"{WHY[dtype]} Weights that are trained with a scaler have to be float32.",
                evidence=(f"They are {listed([tensor.name for tensor in hostile])}.",),
            )
            yield located(said, phase="static", dtype=dtype)


def _trained(subject: Subject) -> Iterator[StaticTensor]:
    """What training would update: an adapter's own weights, or everything that is not known to be frozen."""
    adapter = subject.adapter
    for tensor in subject.floating:
        if tensor.trainable is False:
            continue
        if adapter is None or _saved_whole(tensor, adapter.get("modules_to_save") or ()):
            yield tensor
        elif adapter.get("autocast_adapter_dtype") is False and tensor.dtype in HALF:
            yield tensor  # peft makes float32 of the others when it loads them


def _saved_whole(tensor: StaticTensor, modules: object) -> bool:
    parts = tensor.name.split(".")
    return isinstance(modules, (list, tuple)) and any(module in parts for module in modules)


RULES = (Rule(name="trainable-weights", specs=(UNSCALE_FLOAT16_GRADIENTS, SCALER_BFLOAT16), inspect=check_trainable),)
