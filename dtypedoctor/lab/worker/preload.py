"""What the server of workers imports before it forks them.

A process that has initialised CUDA cannot fork usable workers, and importing bitsandbytes (so also peft and trl)
initialises CUDA where there is a device: measured with bitsandbytes 0.50.2 and peft on an H200. There the server stops
short of them, and each worker imports the rest itself.
"""

import contextlib
import gc
import os

gc.disable()  # a full collection goes through all that has been imported: measured 1.6 to 2.4 of 7 s of CPU time

os.environ.setdefault(
    "PYTORCH_NVML_BASED_CUDA_CHECK", "1"
)  # so that asking for devices does not initialise CUDA either

import torch

with contextlib.suppress(ImportError):
    import accelerate  # noqa: F401
    import datasets  # noqa: F401
    import transformers  # noqa: F401

if not torch.cuda.is_available():
    import dtypedoctor.lab.worker.main  # noqa: F401
    from dtypedoctor.plugins import own_code, resolve

    for reference in own_code():
        with contextlib.suppress(ImportError):  # each library of the extra `hf` may be missing
            resolve(reference)

with contextlib.suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # compiles a thousand patterns, which peft needs for each model: 0.2 s

gc.freeze()  # workers, which inherit all of this, need not search it for garbage: measured 0.45 s a collection without
gc.enable()
