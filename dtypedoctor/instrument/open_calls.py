"""Which of the module calls that began are still running: an exception may end a call without any hook being told.

torch tells hooks of ``Exception`` alone, so not of Ctrl-C, and an interruption may come before a hook has done anything.
"""

import sys
from threading import get_ident
from types import CodeType

from torch import nn
from torch.optim import Optimizer

from dtypedoctor._torch_private import CALL_CODE, call_is_replaced

_STEP: CodeType = Optimizer.profile_hook_step(lambda self: None).__code__


def forget_ended_calls(stack: list[nn.Module], thread: int) -> None:
    """Removes the calls that are over from ``stack``, where the hook that is told of the beginning of a call runs.

    Args:
        stack: modules whose calls have begun, outermost first.
        thread: the thread that they were called in.
    """
    if call_is_replaced():
        return  # somebody has put a function of their own there
    here = thread == get_ident()
    del stack[max(0, _running(CALL_CODE, thread) - here) :]


def steps_running() -> int:
    """How many steps of optimizers, each inside of the one before, are running in this thread."""
    return _running(_STEP, get_ident())


def _running(code: CodeType, thread: int) -> int:
    """How often ``code`` is being executed in ``thread`` at this moment."""
    frame = sys._current_frames().get(thread)
    count = 0
    while frame is not None:
        count += frame.f_code is code
        frame = frame.f_back
    return count
