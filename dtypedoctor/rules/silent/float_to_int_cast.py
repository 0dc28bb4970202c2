"""``float-to-int-cast``: activations that go through an integer dtype."""

from dtypedoctor.diagnosis.rule import SILENT, FindingSpec, Rule
from dtypedoctor.diagnosis.silent.forward import detect_integer_casts

SPEC = FindingSpec(
    id="float-to-int-cast",
    title="Activations were cast to an integer dtype",
    family=SILENT,
    references=("https://github.com/unslothai/unsloth-zoo/pull/482",),
)

RULES = (Rule(name="integer-casts", specs=(SPEC,), detect=detect_integer_casts),)
