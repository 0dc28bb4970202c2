"""``stale-cuda-stream``: kernels that are launched on another stream than the current one.

Seen only where a model names the functions that choose its streams (:class:`dtypedoctor.plugins.Model`).
"""

from dtypedoctor.diagnosis.rule import COMPILE_AND_LOAD, FindingSpec, Rule
from dtypedoctor.diagnosis.streams import detect_stale_streams

SPEC = FindingSpec(
    id="stale-cuda-stream",
    title="A kernel is launched on a CUDA stream that was remembered from an earlier call",
    family=COMPILE_AND_LOAD,
    references=("https://github.com/thad0ctor/axolotl/pull/25",),
    in_any_program=False,
)

RULES = (Rule(name="streams", specs=(SPEC,), detect=detect_stale_streams),)
