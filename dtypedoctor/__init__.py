"""dtypedoctor: finds, explains and fixes mixed-precision failures in PyTorch training.

Importing the package does not import torch; the public names are loaded when they are first used.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
