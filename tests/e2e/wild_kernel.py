"""A kernel that writes far outside of every allocation."""

import triton
import triton.language as tl


@triton.jit
def _wild(pointer):
    tl.store(pointer + (1 << 40), 1.0)


def write_somewhere(tensor):
    """Launches it; the error comes at a later call, as it does with any kernel."""
    _wild[(1,)](tensor)
