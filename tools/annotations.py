"""Prints the findings of a SARIF log as workflow commands of GitHub Actions, which shows each beside its line; action.yml runs it.

A workflow shows 10 errors, 10 warnings and 10 notices of a step at most::

    python tools/annotations.py dtype-report/dtypedoctor.sarif
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def annotations(log: dict[str, Any]) -> Iterator[str]:
    """Write a command for each finding; without any, a notice with the headline, so that the job's page says what was looked at."""
    (run,) = log["runs"]
    for result in run["results"]:
        properties = {"title": result["ruleId"]}
        for location in result["locations"]:
            if physical := location.get("physicalLocation"):
                file = unquote(physical["artifactLocation"]["uri"])
                properties = {"file": file, "line": str(physical["region"]["startLine"])} | properties
        told = ",".join(f"{name}={escaped(value, in_property=True)}" for name, value in properties.items())
        yield f"::{COMMANDS[result['level']]} {told}::{escaped(result['message']['text'])}"
    if not run["results"]:
        yield f"::notice title=dtypedoctor::{escaped(run['properties']['headline'])}"


def escaped(text: str, *, in_property: bool = False) -> str:
    """Escape as the runner reads it back (https://github.com/actions/toolkit/blob/main/packages/core/src/command.ts)."""
    # a line break would begin a command of somebody else's
    shown = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    return shown.replace(":", "%3A").replace(",", "%2C") if in_property else shown


if __name__ == "__main__":
    print("\n".join(annotations(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))))
