"""``checkpoint-dtype-mismatch``: a model in another dtype than its checkpoint or the request says."""

from dtypedoctor.diagnosis.finding import Severity
from dtypedoctor.diagnosis.loading import detect_loading
from dtypedoctor.diagnosis.rule import COMPILE_AND_LOAD, FindingSpec, Rule

SPEC = FindingSpec(
    id="checkpoint-dtype-mismatch",
    title="The model was loaded in another dtype than the checkpoint or the request says",
    family=COMPILE_AND_LOAD,
    severity=Severity.WARNING,
    references=(
        "https://github.com/huggingface/transformers/pull/34919",
        "https://github.com/huggingface/transformers/issues/23357",
    ),
)

RULES = (Rule(name="loading", specs=(SPEC,), detect=detect_loading),)
