"""Building and loading models; here: which ones can be built without a download. The code is imported where one is built."""

from dtypedoctor.plugins import Model

_CODE = "dtypedoctor.models.builtin"

MODELS = (
    Model(name="gemma4-tiny", build=f"{_CODE}:gemma4_tiny"),
    Model(name="llama-tiny", build=f"{_CODE}:llama_tiny"),
    Model(name="llama-nf4-fused", build=f"{_CODE}:llama_nf4_fused"),
    Model(name="custom-moe", build=f"{_CODE}:custom_moe", finished=True),
    Model(name="nf4-compiled", build=f"{_CODE}:nf4_compiled", finished=True),
)
"""The models that come with dtypedoctor."""
