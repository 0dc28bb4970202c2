"""Writes lines of a trace as the writer does."""

import json
from collections.abc import Iterable

from dtypedoctor.trace.lines import seal


def sealed(*lines: object) -> bytes:
    return sealed_bodies(json.dumps(line, separators=(",", ":")).encode() for line in lines)


def sealed_bodies(bodies: Iterable[bytes]) -> bytes:
    """The same for lines that are encoded already."""
    return b"".join(seal(body, number) + b"\n" for number, body in enumerate(bodies, start=1))
