"""What loading a model of somebody else ends with."""

from pickle import UnpicklingError

from safetensors import SafetensorError

CANNOT_LOAD = (
    OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, ImportError, AssertionError, UnpicklingError, SafetensorError,
)  # fmt: skip
"""What libraries raise for a folder that they cannot load, or tokens that they cannot take."""
