"""Whether a replay in which nothing happens waits for what is not there, or for a processor."""

import os
import subprocess
import sys
from time import process_time

from patience import becomes

from dtypedoctor.worker.standbys import busy_time


def test_who_waits_for_a_processor_is_busy() -> None:
    """One core, and another process on it that never rests: what this one has to wait for it is counted."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        before = busy_time() - process_time()
        assert becomes(lambda: sum(range(1_000_000)) and busy_time() - process_time() > before + 0.1)
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cores)
