"""``gradient-underflow``: float16 gradients that are rounded to zero."""

from dtypedoctor.diagnosis.finding import Severity
from dtypedoctor.diagnosis.rule import OF_ANY_FINDING, SILENT, FindingSpec, Rule
from dtypedoctor.diagnosis.silent.training import detect_underflow

SPEC = FindingSpec(
    id="gradient-underflow",
    title="Gradients are flushed to zero in float16",
    family=SILENT,
    severity=Severity.WARNING,
    references=(
        "https://github.com/huggingface/transformers/issues/25021",
        "https://github.com/google/gemma_pytorch/issues/24",
    ),
    remedies=("bfloat16",),
    ablations=("autocast-off", *OF_ANY_FINDING),
    fits_wider_dtype=True,
)

RULES = (Rule(name="gradient-underflow", specs=(SPEC,), detect=detect_underflow),)
