"""Writes scenario files for tests and reads the mistakes that loading finds in them."""

from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from dtypedoctor.errors import ExitCode, UsageError
from dtypedoctor.lab.scenarios.loading import load_scenario

HEALTHY = """\
name: example
summary: A plain forward pass.
steps:
  - model: {name: "builtin:gemma4-tiny"}
    workload:
      kind: forward
"""


def written(directory: Path, text: str | bytes, name: str = "example") -> Path:
    """A file ``NAME.yaml`` with this content."""
    path = directory / f"{name}.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def mistakes(path: Path, known: Mapping[str, Collection[str]] | None = None) -> list[str]:
    """What loading says about the file, one line each, without the file's name in front."""
    with pytest.raises(UsageError) as refused:
        load_scenario(path, known)
    assert refused.value.exit_code is ExitCode.USAGE
    lines = refused.value.message.split("\n")
    assert all(line.startswith(f"{path}:") for line in lines)
    return [line.removeprefix(f"{path}:").strip() for line in lines]
