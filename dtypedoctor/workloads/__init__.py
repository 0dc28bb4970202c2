"""What is done with a model: one file per workload."""

from collections.abc import Callable

from dtypedoctor.workloads.context import Context
from dtypedoctor.workloads.forward import run_forward
from dtypedoctor.workloads.generate import run_generate
from dtypedoctor.workloads.grpo import run_grpo
from dtypedoctor.workloads.sft import run_sft
from dtypedoctor.workloads.train import run_train
from dtypedoctor.workloads.unload import run_unload

WORKLOADS: dict[str, Callable[[Context], None]] = {
    "grpo": run_grpo,
    "sft": run_sft,
    "train": run_train,
    "forward": run_forward,
    "generate": run_generate,
    "unload": run_unload,
}
"""Every workload by the name that stands under ``workload.kind``."""
