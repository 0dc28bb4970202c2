"""``router-flip``: routers that choose other experts than with scores in float32."""

from dtypedoctor.diagnosis.finding import Severity
from dtypedoctor.diagnosis.rule import SILENT, FindingSpec, Rule
from dtypedoctor.diagnosis.silent.forward import detect_router_flips

SPEC = FindingSpec(
    id="router-flip",
    title="Half-precision router scores choose other experts than float32 would",
    family=SILENT,
    severity=Severity.WARNING,
    references=("https://github.com/vllm-project/vllm/pull/14027", "https://github.com/sgl-project/sglang/pull/33764"),
)

RULES = (Rule(name="router-flips", specs=(SPEC,), detect=detect_router_flips),)
