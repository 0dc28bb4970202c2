"""torchrun itself, with what became of the processes written down. Run by its path; imports nothing of this package.

``python elastic.py RESULT NAME ARGUMENTS…`` does what ``torchrun ARGUMENTS…`` does. If processes fail, ``RESULT`` holds, by rank,
the exit status of each that torchrun saw fail (minus the signal that ended it) and when, in seconds since the epoch, and torchrun's
table of failures is about ``NAME``, the program that ``ARGUMENTS`` have recorded.
"""

import contextlib
import json
import os
import signal
import sys
from pathlib import Path
from types import FrameType

_NOT_PASSED = {
    signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL,
    signal.SIGTRAP, signal.SIGSYS, signal.SIGPIPE, signal.SIGXFSZ, signal.SIGTTIN, signal.SIGTTOU, signal.SIGTSTP,
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT,
}  # fmt: skip
"""Those that torchrun handles itself or nobody can, and those by which the kernel tells a process of what it did itself."""


def pass_on(number: int, _: FrameType | None) -> None:
    """Sends a signal that torchrun would die of to the processes that it has started."""
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(child), number)


def main(result: Path, name: str, arguments: list[str]) -> int:
    """Runs torchrun; 1 if a process has failed, with torchrun's own account of it on stderr."""
    for number in signal.valid_signals() - _NOT_PASSED:
        if signal.getsignal(number) == signal.SIG_DFL:
            signal.signal(number, pass_on)
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        failures = {
            str(rank): {"code": failure.exitcode, "time": failure.timestamp} for rank, failure in error.failures.items()
        }
        result.write_text(json.dumps(failures), encoding="utf-8")
        print(ChildFailedError(name, error.failures), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
