"""``stale-autocast-cache``: a layer that computes with an old copy of its weight."""

from dtypedoctor.diagnosis.rule import OF_ANY_FINDING, SILENT, FindingSpec, Rule
from dtypedoctor.diagnosis.silent.forward import detect_stale_cache

SPEC = FindingSpec(
    id="stale-autocast-cache",
    title="Autocast serves an old half-precision copy of a weight that has changed",
    family=SILENT,
    references=("https://github.com/X-GenGroup/Flow-Factory/issues/186", "https://github.com/NVIDIA/apex/issues/132"),
    ablations=("autocast-off", *OF_ANY_FINDING),
    needs="autocast-off",
)

RULES = (Rule(name="stale-autocast-cache", specs=(SPEC,), detect=detect_stale_cache),)
