"""``logprob-gap``: a generator and a trainer that disagree about the same weights."""

from dtypedoctor.diagnosis.finding import Severity
from dtypedoctor.diagnosis.rule import SILENT, FindingSpec, Rule
from dtypedoctor.diagnosis.silent.agreement import detect_gap

SPEC = FindingSpec(
    id="logprob-gap",
    title="Generator and trainer give different log-probabilities for the same weights",
    family=SILENT,
    severity=Severity.WARNING,
    aliases=("train-inference-mismatch",),
    references=("https://github.com/huggingface/trl/pull/3867", "https://github.com/sail-sg/Precision-RL/issues/10"),
)

RULES = (Rule(name="logprob-gap", specs=(SPEC,), detect=detect_gap),)
