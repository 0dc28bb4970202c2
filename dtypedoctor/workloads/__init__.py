"""What is done with a model: one file per workload."""

from collections.abc import Callable

from dtypedoctor.workloads.context import Context
from dtypedoctor.workloads.grpo import run_grpo

WORKLOADS: dict[str, Callable[[Context], None]] = {
    "grpo": run_grpo,
}
"""Every workload by the name that stands under ``workload.kind``."""
