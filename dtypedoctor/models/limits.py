"""Bounds the memory of the process that makes the call of a stranger's capsule."""

import resource
from pathlib import Path

from dtypedoctor.errors import UsageError
from dtypedoctor.replay.capsule import UNLIMITED, Capsule

__all__ = ["is_out_of_memory", "limit_memory", "over_limit"]

_FIXED = 4 << 30
"""Bytes for activations, and for what the libraries allocate."""
_TIMES = 16
"""How often the tensors fit beside that: in two dtypes, with gradients, and once more in float32."""


def limit_memory(capsule: Capsule) -> None:
    """Bounds what this process may allocate from now on, by the size of the tensors and by the memory that is free.

    A few numbers in a capsule (labels of a configuration, steps of an operator) can ask for any amount of memory.
    Not to be called where CUDA is used, which maps far more than it needs.

    Raises:
        UsageError: the capsule is damaged.
    """
    room = min(_FIXED + _TIMES * capsule.memory, _bytes("/proc/meminfo", "MemAvailable"))
    limit = _bytes("/proc/self/status", "VmData") + room
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if soft == resource.RLIM_INFINITY or limit < soft:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation on the CPU failed; torch's allocator raises a plain RuntimeError that only names it."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def over_limit() -> UsageError:
    """What is said of a capsule that needs more memory than it may."""
    return UsageError("the call of the capsule needs more memory than a replay may take", UNLIMITED)


def _bytes(path: str, key: str) -> int:
    """A line `KEY: N kB` of a file of the kernel."""
    lines = dict(line.split(":", 1) for line in Path(path).read_text(encoding="utf-8").splitlines() if ":" in line)
    return int(lines[key].split()[0]) << 10
