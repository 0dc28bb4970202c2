"""What ``dtypedoctor treat`` costs beside the bare script.

    python tests/benchmarks/treat_cost.py [--rounds 7]

Two scripts, each bare and treated in turn: one that calls a corrected function of a library 3,000,000 times (the edit of
``unsloth-buffer-of-its-dtype``, in a package with the lines that it is for), and one that trains adapters with TRL (``float32-adapters``,
which changes a model). Prints for each the seconds of the loop or of the training, and of the whole process: median, smallest and largest
ratio of pairs.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
LIBRARY = """
BUFFER = {}
def fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False):
    dtype, WEIGHT_BUFFER = quant_state, BUFFER.get(0)
    if WEIGHT_BUFFER is None:
        BUFFER[0] = WEIGHT_BUFFER = W
    return WEIGHT_BUFFER
"""
CALLS = """
import time
from types import SimpleNamespace
from unsloth.kernels.utils import fast_dequantize
weight = SimpleNamespace(dtype="half")
began = time.perf_counter()
for _ in range(3_000_000):
    fast_dequantize(weight, "half")
print("seconds", time.perf_counter() - began)
"""
TRAINS = """
import runpy, sys, time
import torch
from transformers import TrainerCallback, trainer_callback
began = []
class Clock(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 1:
            began.append(time.perf_counter())
    def on_train_end(self, args, state, control, **kwargs):
        print("seconds", time.perf_counter() - began[0])
trainer_callback.DefaultFlowCallback.on_train_end = Clock.on_train_end
old = trainer_callback.DefaultFlowCallback.on_step_begin
trainer_callback.DefaultFlowCallback.on_step_begin = Clock.on_step_begin
sys.argv = ["adapters.py", "dpo", "packed"]
sys.path.insert(0, PROGRAMS)
import tiny
tiny.QUIET["max_steps"] = 60
runpy.run_path(PROGRAMS + "/adapters.py", run_name="__main__")
"""


def seconds(command: list[str], folder: Path) -> tuple[float, float]:
    """Of what the script measures itself, and of the whole process."""
    began = time.perf_counter()
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    whole = time.perf_counter() - began
    found = re.search(r"^seconds (.+)$", done.stdout, re.MULTILINE)
    assert found is not None, done.stderr
    return float(found[1]), whole


def ratios(name: str, script: Path, correction: str, rounds: int, beside: Path | None = None) -> None:
    """Prints a line for the script's own time and one for the process; the bare script is ``beside`` if given."""
    bare = [sys.executable, str(beside or script)]
    treated = [sys.executable, "-m", "dtypedoctor", "treat", "--with", correction, str(script)]
    pairs = [(seconds(bare, script.parent), seconds(treated, script.parent)) for _ in range(rounds)]
    for index, what in enumerate(("in the script", "whole process")):
        times = [(one[index], other[index]) for one, other in pairs]
        each = sorted(other / one for one, other in times)
        added = median(other - one for one, other in times)
        print(
            f"{name}, {what}: {median(each):.3f} ({each[0]:.3f} to {each[-1]:.3f}), "
            f"{median(one for one, _ in times):.3f} s bare, {added:+.3f} s",
            flush=True,
        )


def script_with_library(folder: Path, source: str) -> Path:
    """The script that calls the library, with a library of this source beside it."""
    package = folder / "unsloth" / "kernels"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "utils.py").write_text(source)
    script = folder / "calls.py"
    script.write_text(CALLS)
    return script


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        calls = script_with_library(Path(folder) / "released", LIBRARY)
        fixed = script_with_library(
            Path(folder) / "fixed", LIBRARY.replace("is None:", "is None or WEIGHT_BUFFER.dtype != dtype:")
        )
        trains = Path(folder) / "trains.py"
        trains.write_text(f"PROGRAMS = {str(ROOT / 'scenarios/trainers/programs')!r}\n{TRAINS}")
        ratios("edited function", calls, "unsloth-buffer-of-its-dtype", rounds)
        ratios(
            "edited function beside the library's own fix", calls, "unsloth-buffer-of-its-dtype", rounds, beside=fixed
        )
        ratios("corrected model", trains, "float32-adapters", rounds)


main()
