"""Runs commands one after the other in this process, with little memory and little time for each; what came of them as JSON.

Standard input holds a list of argument lists.
"""

import contextlib
import io
import json
import resource
import signal
import sys
from unittest import mock

from dtypedoctor.cli.main import main

MEMORY = 2 << 30
SECONDS, WAITING = 30, 600
"""Of the processor's time, and on the clock: a busy machine makes nothing slow, and what waits for a pipe is stopped all the same."""


def ran(arguments: list[str]) -> dict[str, object]:
    """Exit code and what was printed; the code is a word where it had to be stopped."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    code: object = "no exit"
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("sys.argv", ["dtypedoctor", *arguments]),
    ):
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(WAITING)
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        except BaseException as error:  # noqa: BLE001
            code = type(error).__name__
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
    return {"arguments": arguments, "code": code, "out": _text(out), "err": _text(err)}


def _text(stream: io.TextIOWrapper) -> str:
    stream.flush()
    return stream.buffer.getvalue().decode()  # type: ignore[attr-defined, no-any-return]


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for number in (signal.SIGPROF, signal.SIGALRM):
        signal.signal(number, mock.Mock(side_effect=TimeoutError))
    json.dump([ran(arguments) for arguments in json.load(sys.stdin)], sys.stdout)
