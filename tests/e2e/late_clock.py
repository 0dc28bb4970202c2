"""Runs dtypedoctor with a clock that is past every time limit as soon as a file exists.

``python late_clock.py FILE ARGUMENTS`` is ``dtypedoctor ARGUMENTS``. A test of a time limit so waits until what is limited hangs, and not for as
long as that may take on a busy machine. Processes that the command starts have the true time.
"""

import runpy
import sys
import time
from pathlib import Path

from patience import late_with

time.monotonic = late_with(Path(sys.argv.pop(1)))
sys.path[0] = ""  # as for python -m
runpy.run_module("dtypedoctor", run_name="__main__", alter_sys=True)
