"""What a report is about, in a line: which workload, on which model, in which dtype, where."""

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from dtypedoctor.report.model import Report
from dtypedoctor.report.numbers import counted
from dtypedoctor.report.text import one_line
from dtypedoctor.report.to_json import plain
from dtypedoctor.scenario.model import Scenario, ScenarioStep

__all__ = ["what_ran"]

_BUILTIN = "builtin:"
_MOST_STEPS = 3
"""Steps of a scenario that are told."""


def what_ran(report: Report) -> str:
    """What the untreated run does, e.g. ``grpo on the small builtin model llama, bfloat16, LoRA; on cpu``.

    Empty where the report does not carry a whole scenario (it was redacted, or is older than the present keys).
    """
    try:
        scenario = Scenario.model_validate(plain(report.scenario))
    except ValidationError:
        return ""
    told = [_step(step) for step in scenario.steps[:_MOST_STEPS]]
    more = len(scenario.steps) - len(told)
    told += [f"{more} more"] if more else []
    jobs = scenario.distributed
    ranks = f", in {counted(jobs.processes, 'process', 'processes')}" if jobs is not None else ""
    device = str(report.environment.get("device", ""))
    return one_line("; then ".join(told) + (f"; on {device}" if device else "") + ranks, 400)


def _step(step: ScenarioStep) -> str:
    return ", ".join(_parts(step))


def _parts(step: ScenarioStep) -> Iterator[str]:
    model: Any = step.model
    on = ""
    if model is not None:
        own = model.name.startswith(_BUILTIN)
        name = f"the small builtin model {model.name.removeprefix(_BUILTIN)}" if own else f"the model {model.name}"
        on = f" on {name}"
    yield f"{step.workload.kind}{on}"
    if model is not None:
        yield f"{model.dtype}" + (f" with {model.quantization.kind} weights" if model.quantization is not None else "")
    if model is not None and model.lora is not None:
        yield "LoRA"
    if step.autocast is not None:
        yield f"{step.autocast.dtype} autocast"
    if step.compile is not None:
        yield "compiled"
