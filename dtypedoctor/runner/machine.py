"""What machine this is, for a process without torch: which GPUs it has, and all that a run on it records."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dtypedoctor.errors import WorkerDiedError

_DRIVER = Path("/proc/driver/nvidia/gpus")
VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(environment: Mapping[str, str] = os.environ, driver: Path = _DRIVER) -> tuple[str, ...]:
    """What ``CUDA_VISIBLE_DEVICES`` names, else the numbers of all GPUs that the driver knows."""
    named = environment.get(VARIABLE)
    if named is not None:
        return tuple(part.strip() for part in named.split(",") if part.strip())
    try:
        return tuple(str(number) for number, _ in enumerate(driver.iterdir()))
    except OSError:
        return ()


def gpu_environment(slot: int, gpus: tuple[str, ...]) -> dict[str, str]:
    """The variables by which a worker gets one GPU for itself; none where there is nothing to share out."""
    return {VARIABLE: gpus[slot % len(gpus)]} if len(gpus) > 1 else {}


_WORKER = "dtypedoctor.worker.environment"
_TIME_LIMIT = 180


def survey() -> dict[str, Any]:
    """Versions, devices, settings and the environment variables that matter, as a run would record them.

    Raises:
        WorkerDiedError: the process left no description, usually because torch cannot be imported.
    """
    with tempfile.TemporaryDirectory() as place:
        result, log = Path(place, "survey.json"), Path(place, "log.txt")
        # -P: a torch.py or datasets folder in the working directory must not be taken for the real one
        command = [sys.executable, "-P", "-m", _WORKER, str(result)]
        with log.open("wb") as streams:
            try:
                code = subprocess.run(
                    command,
                    stdout=streams,
                    stderr=streams,
                    timeout=_TIME_LIMIT,
                    check=False,
                    env=os.environ | {"PYTHONSAFEPATH": "1"},  # torch's own tool starts `python -m pip`
                ).returncode
            except subprocess.TimeoutExpired:
                code = None
        try:
            found = json.loads(result.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise _died(code, log.read_text(encoding="utf-8", errors="replace")) from None
    assert isinstance(found, dict)
    return found


def _died(code: int | None, log: str) -> WorkerDiedError:
    how = f"after {_TIME_LIMIT} s without an answer" if code is None else f"with status {code}"
    last = next((line.strip() for line in reversed(log.splitlines()) if line.strip()), "")
    return WorkerDiedError(
        f"the process that describes the machine ended {how}" + (f": {last[:300]}" if last else ""),
        "Try `python -c 'import torch'` with the same interpreter.",
    )
