"""What is done with a model: ``loops.py`` needs torch only, ``trainers.py`` TRL. The code is imported where a workload runs."""

from dtypedoctor.plugins import Workload

_TRAINERS = ("trl", "transformers", "accelerate", "datasets")

WORKLOADS = (
    Workload(name="grpo", run="dtypedoctor.lab.workloads.trainers:run_grpo", needs=_TRAINERS),
    Workload(name="sft", run="dtypedoctor.lab.workloads.trainers:run_sft", needs=_TRAINERS),
    Workload(name="train", run="dtypedoctor.lab.workloads.loops:run_train"),
    Workload(name="forward", run="dtypedoctor.lab.workloads.loops:run_forward"),
    Workload(name="generate", run="dtypedoctor.lab.workloads.loops:run_generate"),
    Workload(name="unload", run="dtypedoctor.lab.workloads.loops:run_unload"),
    Workload(name="capsule-call", run="dtypedoctor.lab.worker.stage:run_capsule_call"),
)
"""The workloads that come with dtypedoctor, each by the ``kind`` that stands in a scenario."""
