"""``torch.compile`` that gives up."""

from dtypedoctor.diagnosis.compilation import detect_compilation
from dtypedoctor.diagnosis.finding import Severity
from dtypedoctor.diagnosis.rule import COMPILE_AND_LOAD, FindingSpec, Rule

COMPILE_GRAPH_BREAK = FindingSpec(
    id="compile-graph-break",
    title="torch.compile gives up at an operation it cannot trace",
    family=COMPILE_AND_LOAD,
    severity=Severity.WARNING,
    references=(
        "https://github.com/thad0ctor/axolotl/pull/25",
        "https://github.com/axolotl-ai-cloud/axolotl/pull/3677",
    ),
    ablations=("eager-attention",),
)
RECOMPILE_LIMIT = FindingSpec(
    id="recompile-limit",
    title="A compiled function was recompiled until Dynamo gave up",
    family=COMPILE_AND_LOAD,
    severity=Severity.WARNING,
    references=(
        "https://github.com/thad0ctor/axolotl/pull/25",
        "https://github.com/axolotl-ai-cloud/axolotl/pull/3677",
    ),
    ablations=("eager-attention",),
)

RULES = (Rule(name="compilation", specs=(COMPILE_GRAPH_BREAK, RECOMPILE_LIMIT), detect=detect_compilation),)
