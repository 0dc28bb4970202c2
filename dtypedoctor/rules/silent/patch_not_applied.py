"""``patch-not-applied``: a correction that nothing calls."""

from dtypedoctor.diagnosis.finding import Severity
from dtypedoctor.diagnosis.rule import SILENT, FindingSpec, Rule
from dtypedoctor.diagnosis.silent.agreement import detect_missing_patches

SPEC = FindingSpec(
    id="patch-not-applied",
    title="A correction was asked for and is not in place",
    family=SILENT,
    severity=Severity.WARNING,
    references=("https://github.com/unslothai/unsloth-zoo/pull/600",),
)

RULES = (Rule(name="missing-patches", specs=(SPEC,), detect=detect_missing_patches),)
