"""The version, by itself: what prints it does not import the package's public names."""

__version__ = "0.2.0"
