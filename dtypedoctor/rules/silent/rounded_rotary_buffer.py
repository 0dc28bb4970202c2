"""``rounded-rotary-buffer``: positions and rotary tables in half precision."""

from dtypedoctor.diagnosis.finding import Severity
from dtypedoctor.diagnosis.rule import SILENT, FindingSpec, Rule
from dtypedoctor.diagnosis.silent.positional import detect_rotary_tables, detect_rounded_positions

SPEC = FindingSpec(
    id="rounded-rotary-buffer",
    title="Rotary frequencies or positions were rounded to half precision",
    family=SILENT,
    severity=Severity.WARNING,
    references=(
        "https://github.com/huggingface/transformers/issues/25681",
        "https://github.com/NVIDIA-NeMo/Automodel/pull/2549",
    ),
)

RULES = (
    Rule(name="rounded-positions", specs=(SPEC,), detect=detect_rounded_positions),
    Rule(name="rotary-tables", specs=(SPEC,), detect=detect_rotary_tables),
)
