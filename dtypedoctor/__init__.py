"""dtypedoctor: finds, explains and fixes mixed-precision failures in PyTorch training.

Importing the package does not import torch; the public names are loaded when they are first used.
"""

from importlib import metadata as _metadata

__version__ = _metadata.version("dtypedoctor")

__all__ = ["__version__"]
