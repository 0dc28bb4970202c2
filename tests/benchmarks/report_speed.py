"""How long `dtypedoctor report` takes for a trace of 1,000 modules × 200 steps, forward and backward: 400,000 samples.

    python tests/benchmarks/report_speed.py

Prints, per format, processor time and wall-clock time of the whole command (median of five) and its peak memory.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from run_directories import Shape, large_run

FORMATS = ("terminal", "md", "html", "json", "junit")
REPEATS = 5

MEASURE = """
import json, resource, sys
from dtypedoctor.cli.main import main
try:
    main()
except SystemExit:
    pass
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([used.ru_utime + used.ru_stime, used.ru_maxrss / 1024]), file=sys.stderr)
"""


def once(run: Path, style: str) -> tuple[float, float, float]:
    """Processor seconds, wall-clock seconds and MiB of one command."""
    began = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "report", str(run), "--format", style],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    wall = time.perf_counter() - began
    processor, memory = json.loads(done.stderr.splitlines()[-1])
    return processor, wall, memory


def main() -> None:
    """Measures every format and prints a table."""
    with tempfile.TemporaryDirectory() as directory:
        run = large_run(Path(directory) / "run", Shape(modules=1000, steps=200))
        print(f"{'format':<10} {'processor s':>12} {'wall s':>8} {'peak MiB':>9}")
        for style in FORMATS:
            processor, wall, memory = zip(*(once(run, style) for _ in range(REPEATS)), strict=True)
            print(f"{style:<10} {median(processor):12.2f} {median(wall):8.2f} {max(memory):9.0f}")


if __name__ == "__main__":
    main()
