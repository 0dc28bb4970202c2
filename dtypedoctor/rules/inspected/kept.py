"""Tensors that stay float32 in a half-precision model."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Confidence, Finding, Severity
from dtypedoctor.diagnosis.rule import Rule
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.subject import StaticTensor, Subject
from dtypedoctor.diagnosis.wording import listed
from dtypedoctor.dtypes import HALF
from dtypedoctor.rules.mismatch.rule import NORM_PROMOTES_TO_FLOAT32

ID = "norm-promotes-to-float32"


def check_kept(subject: Subject) -> Iterator[Finding]:
    """Which tensors the model's class keeps in float32: what they touch may be float32 too."""
    target = subject.load_dtype
    if target not in HALF or subject.quant_states:
        return
    kept = [t for t in subject.floating if (subject.loaded or subject.keeps(t, target)) and _is_odd(subject, t, target)]
    if not kept:
        return
    why = "the model's class lists them to be kept so" if not subject.loaded else "they are so in memory"
    said = Statement(
        id=ID,
        severity=Severity.INFO,
        confidence=Confidence.POSSIBLE,
        summary=f"{len(kept)} tensor(s) stay float32 in a {target} model.",
        cause=f"A float32 weight can make a module's output float32, which the next {target} layer refuses without autocast. "
        f"They are float32 because {why}.",
        evidence=(f"They are {listed([tensor.name for tensor in kept])}.", *_lists(subject)),
    )
    yield located(said, phase="static", dtype="float32")


def _is_odd(subject: Subject, tensor: StaticTensor, target: str) -> bool:
    return subject.in_memory(tensor) == "float32" and target != "float32" and not tensor.name.endswith("inv_freq")


def _lists(subject: Subject) -> Iterator[str]:
    for attribute, modules in subject.keep_in_fp32.items():
        yield f"{attribute} of {subject.config.get('model_type')} holds {', '.join(modules)}."


RULES = (Rule(name="kept-weights", specs=(NORM_PROMOTES_TO_FLOAT32,), inspect=check_kept),)
