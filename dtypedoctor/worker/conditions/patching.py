"""Replaces an attribute for as long as a condition is in force."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Inside, ``owner.name`` is ``replacement``; ``owner`` is a class or a module that has that attribute itself."""
    original = owner.__dict__[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)
