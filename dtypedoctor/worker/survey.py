"""A process of its own that describes the machine and leaves the description in the file that it is given."""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils import collect_env

from dtypedoctor.interruptions import contained
from dtypedoctor.worker.environment import describe_environment

LONGEST_LINE = 300


def survey() -> dict[str, Any]:
    """What a run on this machine records, and under ``collect_env`` what torch's own tool finds out."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return {**describe_environment(device), "collect_env": _collected()}


def _collected() -> dict[str, Any]:
    """torch's own description, without what stands in the rest already; the processor in two lines instead of sixty."""
    found: dict[str, Any] = {}
    with contained() as odd:  # it starts a dozen programs, any of which may be odd on somebody's machine
        found = collect_env.get_env_info()._asdict()
    if odd.error is not None:
        return {"error": f"{type(odd.error).__name__}: {odd.error}"}
    processor = _processor(found.pop("cpu_info", None))
    packages = [line for line in str(found.pop("pip_packages", None) or "").splitlines() if line]
    rest = {name: str(value)[:LONGEST_LINE] for name, value in found.items() if value not in (None, "", "N/A")}
    return rest | processor | ({"pip_packages": packages} if packages else {})


def _processor(text: str | None) -> dict[str, str]:
    lines = dict(line.split(":", 1) for line in (text or "").splitlines() if ":" in line)
    wanted = {"cpu": "Model name", "cpu_count": "CPU(s)"}
    return {name: lines[label].strip() for name, label in wanted.items() if label in lines}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(survey()), encoding="utf-8")
