"""Has a standby go on from where it was forked, in a copy that writes a trace of its own, and waits for its end."""

import contextlib
import os
import select
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtypedoctor.replay.standby import PREFIX, send
from dtypedoctor.values import dataclass

if TYPE_CHECKING:  # the process that is watched imports this module, and no pydantic
    from dtypedoctor.scenario.model import Window

__all__ = ["Waiting", "before", "dismiss", "go_on", "waiting_in"]

START_SECONDS = 20.0
"""How long a standby may take to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A standby as the file with its address shows it: forked before the outermost call number ``call``, in step ``step``."""

    step: int
    call: int
    address: Path


def waiting_in(directory: Path) -> list[Waiting]:
    """The standbys of the run in ``directory``, the latest first."""
    found = []
    for address in directory.glob(f"{PREFIX}*"):
        step, _, call = address.name.removeprefix(PREFIX).partition("-")
        if step.isdecimal() and call.isdecimal():
            found.append(Waiting(step=int(step), call=int(call), address=address))
    return sorted(found, key=lambda one: (one.step, one.call), reverse=True)


def before(standbys: Sequence[Waiting], windows: Sequence["Window"]) -> Waiting | None:
    """The latest of ``standbys`` from which all of ``windows`` are still to come."""
    return next((one for one in standbys if all(_is_to_come(window, one) for window in windows)), None)


def _is_to_come(window: "Window", standby: Waiting) -> bool:
    if window.step:
        return standby.step < window.step or (standby.step == window.step == 1)
    return standby.call < window.call or (standby.call == window.call and (not window.early or window.call == 1))


def dismiss(directory: Path) -> None:
    """Ends every standby of the run in ``directory``."""
    for waiting in waiting_in(directory):
        with contextlib.suppress(OSError, ValueError):
            send(waiting.address, None)
        with contextlib.suppress(OSError):
            waiting.address.unlink()


def go_on(waiting: Waiting, directory: Path, request: Mapping[str, Any], seconds: float) -> bool:
    """Has ``waiting`` go on, and waits until that has ended.

    Args:
        waiting: what is to go on.
        directory: exists; where the trace goes.
        request: what the process is told, beside the directory.
        seconds: after which it is killed.

    Returns:
        Whether it came to its end.

    Raises:
        OSError: it does not answer.
    """
    done, writer = os.pipe()
    try:
        recorded = waiting.address.resolve().parent  # which may have been moved since the program ended
        where = {"directory": str(directory.resolve()), "recorded": str(recorded)}
        try:
            send(waiting.address, {**request, **where, "done": f"/proc/{os.getpid()}/fd/{writer}"})
            if not select.select([done], [], [], START_SECONDS)[0]:
                raise TimeoutError("the standby process did not go on")
            process = int(os.read(done, 32))
        finally:
            os.close(writer)  # from now on the process alone holds an end, so its end is that of the pipe
        ended = False
        try:
            ended = _wait_for_end(done, seconds)
        finally:
            if not ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
    finally:
        os.close(done)
    return ended


def _wait_for_end(done: int, seconds: float) -> bool:
    return bool(select.select([done], [], [], seconds)[0])
