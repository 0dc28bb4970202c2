"""``update-stall``: weights that the optimizer's updates do not move."""

from dtypedoctor.diagnosis.finding import Severity
from dtypedoctor.diagnosis.rule import SILENT, FindingSpec, Rule
from dtypedoctor.diagnosis.silent.training import detect_partial_stall, detect_stall

SPEC = FindingSpec(
    id="update-stall",
    title="The optimizer's update is smaller than the weight can represent",
    family=SILENT,
    severity=Severity.WARNING,
    references=(
        "https://github.com/pytorch/ao/pull/1124",
        "https://github.com/huggingface/trl/issues/7268",
        "https://github.com/meta-pytorch/torchtune/issues/2254",
    ),
)

RULES = (
    Rule(name="update-stall", specs=(SPEC,), detect=detect_stall),
    Rule(name="partial-stall", specs=(SPEC,), detect=detect_partial_stall),
)
