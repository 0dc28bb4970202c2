"""Building and loading models; here: which ones can be built without a download. The code is imported where one is built."""

from dtypedoctor.plugins import Model

MODELS = (Model(name="llama-tiny", build="dtypedoctor.lab.models.builtin:llama_tiny", needs=("transformers",)),)
"""The models that come with dtypedoctor and are for no ticket."""
