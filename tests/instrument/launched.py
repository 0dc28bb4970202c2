"""Runs a scenario in a real worker and reads what it left."""

from pathlib import Path
from typing import Any

from dtypedoctor.lab.runner.launch import Launcher
from dtypedoctor.lab.scenarios.model import Request, Scenario
from dtypedoctor.runner.run import Run

LORA = {"r": 4, "alpha": 8, "targets": ["q_proj", "v_proj"]}


def launched(directory: Path, *steps: dict[str, Any], watch: bool = True, **more: Any) -> Run:
    """The run of these steps in ``directory``, which must exist and hold no run yet."""
    scenario = Scenario.model_validate({"name": "case", "summary": "A case.", "steps": list(steps), **more})
    with Launcher(directory / "server.log") as launcher:
        return launcher.run(Request(scenario=scenario, watch=watch), directory / "run")


def llama(dtype: str = "float32", **more: Any) -> dict[str, Any]:
    """The tiny Llama with LoRA."""
    return {"name": "builtin:llama-tiny", "dtype": dtype, "lora": LORA, **more}
