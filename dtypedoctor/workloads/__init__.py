"""What is done with a model: one file per workload. The code is imported where a workload runs."""

from dtypedoctor.plugins import Workload

WORKLOADS = (
    Workload(name="grpo", run="dtypedoctor.workloads.grpo:run_grpo"),
    Workload(name="sft", run="dtypedoctor.workloads.sft:run_sft"),
    Workload(name="train", run="dtypedoctor.workloads.train:run_train"),
    Workload(name="forward", run="dtypedoctor.workloads.forward:run_forward"),
    Workload(name="generate", run="dtypedoctor.workloads.generate:run_generate"),
    Workload(name="unload", run="dtypedoctor.workloads.unload:run_unload"),
)
"""The workloads that come with dtypedoctor, each by the ``kind`` that stands in a scenario."""
