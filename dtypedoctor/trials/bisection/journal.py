"""The log of a bisection: what was asked for, and every probe with its outcome, one JSON object a line."""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import parse_json, read_head
from dtypedoctor.scenario.model import Scenario

__all__ = ["JOURNAL", "Asked", "Journal"]

JOURNAL = "bisection.jsonl"
SCHEMA = 1

_LONGEST = 1 << 20
"""Bytes of the first line, which holds a scenario."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a bisection was asked to do.

    Attributes:
        scenario: the scenario under bisection.
        tolerance: the accepted difference, where it was given.
    """

    scenario: Scenario
    tolerance: float | None


class Journal:
    """Appends to the log; each line reaches the kernel as a whole, so that nothing but a power cut loses it.

    Args:
        directory: the run directory.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / JOURNAL

    def begin(self, asked: Asked) -> None:
        """The first line.

        Raises:
            FileExistsError: there is a log already.
        """
        with self._path.open("xb", buffering=0) as file:
            file.write(_line({
                "schema": SCHEMA,
                "scenario": asked.scenario.model_dump(mode="json", exclude_defaults=True),
                "tolerance": asked.tolerance,
            }))  # fmt: skip

    def note(self, event: str, **values: Any) -> None:
        """Appends one event; without room for it the log lacks it, and nothing else is lost."""
        with contextlib.suppress(OSError), self._path.open("ab", buffering=0) as file:
            file.write(_line({"event": event, **values}))

    def asked(self) -> Asked:
        """What the log's first line says.

        Raises:
            UsageError: there is no log, or it cannot be read.
        """
        try:
            first = parse_json(read_head(self._path, _LONGEST).partition(b"\n")[0])
            if first["schema"] > SCHEMA:
                raise UsageError(f"{self._path}: written by a newer version", "Update dtypedoctor to go on with it.")
            return Asked(
                scenario=Scenario.model_validate(first["scenario"]),
                tolerance=first["tolerance"],
            )
        except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
            raise UsageError(
                f"{self._path.parent}: nothing to go on with here",
                "Give --resume the directory of a bisection that was interrupted.",
            ) from error


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
