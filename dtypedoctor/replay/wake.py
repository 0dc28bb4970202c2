"""Has a standby go on from where it was forked, in a copy that writes a trace of its own, and waits for its end."""

import contextlib
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtypedoctor.replay.standby import PREFIX
from dtypedoctor.unpatched import to_json
from dtypedoctor.values import dataclass

if TYPE_CHECKING:  # the process that is watched imports this module, and no pydantic
    from dtypedoctor.scenario.model import Window

__all__ = ["DONE", "Waiting", "before", "dismiss", "go_on", "waiting_in"]

DONE = "going-on"
"""Name of the pipe, in the directory of the new trace, whose end is the end of the process."""
START_SECONDS = 20.0
"""How long a standby may take to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A standby as its pipe shows it: forked before the outermost call number ``call``, in step ``step``."""

    step: int
    call: int
    pipe: Path


def waiting_in(directory: Path) -> list[Waiting]:
    """The standbys of the run in ``directory``, the latest first."""
    found = []
    for pipe in directory.glob(f"{PREFIX}*"):
        step, _, call = pipe.name.removeprefix(PREFIX).partition("-")
        if step.isdecimal() and call.isdecimal() and pipe.is_fifo():
            found.append(Waiting(step=int(step), call=int(call), pipe=pipe))
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
        with contextlib.suppress(OSError):
            _send(waiting.pipe, None)
        with contextlib.suppress(OSError):
            waiting.pipe.unlink()


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
    pipe = directory / DONE
    os.mkfifo(pipe, 0o600)
    done = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        recorded = waiting.pipe.resolve().parent  # which may have been moved since the program ended
        _send(waiting.pipe, {**request, "directory": str(directory.resolve()), "recorded": str(recorded)})
        process = _first_word(done)
        ended = False
        try:
            ended = _wait_for_end(done, seconds)
        finally:
            if not ended:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
    finally:
        os.close(done)
        pipe.unlink()
    return ended


def _send(pipe: Path, request: Mapping[str, Any] | None) -> None:
    descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.write(descriptor, to_json(request).encode("ascii") + b"\n")
    finally:
        os.close(descriptor)


def _first_word(done: int) -> int:
    """The number of the process, which it writes when it goes on.

    Raises:
        OSError: it does not.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        word = os.read(done, 32) if select.select([done], [], [], 0.05)[0] else b""
        if word:
            return int(word)
        time.sleep(0.005)  # nobody has opened the other end yet
    raise TimeoutError("the standby process did not go on")


def _wait_for_end(done: int, seconds: float) -> bool:
    return bool(select.select([done], [], [], seconds)[0])
