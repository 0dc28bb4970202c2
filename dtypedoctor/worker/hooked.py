"""The one way into a process: it waits for torch, and then records itself.

Python executes this file by its path when an interpreter starts: from ``inherited/sitecustomize.py`` where ``exec`` has set ``DTYPEDOCTOR_JOB``, or
from a ``.pth`` file where ``dtypedoctor enable`` has been called and ``DTYPEDOCTOR=1`` is set. Until the program imports torch the process has one
finder on ``sys.meta_path`` and two modules of this package more, and nothing else.
"""

import os
import sys

JOB, BEGUN, STATES = "DTYPEDOCTOR_JOB", "begun", "random_states.json"
"""As in ``trace/ranks.py``, which imports more than a process without torch is to have."""
_NOT_PROGRAMS = ("compile_worker", "multiprocessing.resource_tracker")
"""In the arguments of processes that compile, or that only track resources."""


def begin() -> None:
    """Has this process recorded from the moment at which it has imported torch; does nothing in dtypedoctor's own processes."""
    words = sys.orig_argv
    if "dtypedoctor.worker.on_import" in sys.modules:
        return  # in a virtual environment Python executes each .pth file twice; or this process is a treated one
    if any(part in word for word in words for part in _NOT_PROGRAMS) or _is_ours(words):
        return
    job = os.environ.get(JOB)
    is_first = job is not None and _is_first(job)
    home = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    before = list(sys.path)
    sys.path.append(home)
    try:
        from dtypedoctor.worker.on_import import after_import

        if job is not None and os.path.exists(os.path.join(job, STATES)):
            from dtypedoctor.worker.repeating import repeat

            repeat(job, is_first=is_first)
    finally:
        sys.path[:] = before
    at_start = dict(os.environ)  # a program that has no launcher may call itself rank 0
    after_import("torch", lambda: _record(at_start))


def _is_first(job: str) -> bool:
    """Leaves a mark in the folder; whether this is the first process that does."""
    try:
        os.close(os.open(os.path.join(job, BEGUN), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except OSError:  # it is there, or the run is over, or its folder is on another machine
        return False
    return True


def _is_ours(words: "list[str]") -> bool:
    """Whether dtypedoctor records this process already, or it is dtypedoctor."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    return any(
        word.startswith((package, "dtypedoctor.worker.", "dtypedoctor.lab.")) or os.path.basename(word) == "dtypedoctor"
        for word in words[:4]
    )


def _record(at_start: "dict[str, str]") -> None:
    """Torch is there."""
    from dtypedoctor.worker.script import record_this_process

    if any("multiprocessing.forkserver" in word for word in sys.orig_argv):
        os.register_at_fork(after_in_child=lambda: record_this_process(at_start))  # the server itself computes nothing
    else:
        record_this_process(at_start)


if __name__ == "dtypedoctor-hook":
    begin()
