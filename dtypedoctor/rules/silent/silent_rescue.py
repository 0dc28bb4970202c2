"""``silent-rescue``: inf and NaN that are replaced in the middle of the model."""

from dtypedoctor.diagnosis.finding import Severity
from dtypedoctor.diagnosis.rule import OF_ANY_FINDING, SILENT, FindingSpec, Rule
from dtypedoctor.diagnosis.silent.absorbed import detect_rescues
from dtypedoctor.diagnosis.silent.erased import detect_erased

SPEC = FindingSpec(
    id="silent-rescue",
    title="Clamping or nan_to_num replaces non-finite values in the middle of the model",
    family=SILENT,
    severity=Severity.WARNING,
    aliases=("masked-overflow",),
    references=(
        "https://github.com/unslothai/unsloth-zoo/pull/600",
        "https://github.com/huggingface/transformers/pull/9487",
    ),
    ablations=("autocast-off", *OF_ANY_FINDING),
    fits_wider_dtype=True,
)

RULES = (
    Rule(name="rescues", specs=(SPEC,), detect=detect_rescues),
    Rule(name="erased", specs=(SPEC,), detect=detect_erased),
)
