"""A large trace becomes a report without much memory and without torch."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from run_directories import Shape, large_run

pytestmark = pytest.mark.release

MEGABYTES = 300

MEASURE = """
import json, sys
from dtypedoctor.cli.main import main
sys.argv[0] = "dtypedoctor"
try:
    main()
except SystemExit:
    pass
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
known = sorted({name.split(".")[0] for name in sys.modules} & {"torch", "numpy", "transformers"})
print(json.dumps({"megabytes": int(status["VmHWM"].split()[0]) / 1024, "known": known}), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 1,000 modules × 200 steps, forward and backward: 400,000 samples."""
    return large_run(tmp_path_factory.mktemp("speed") / "run", Shape(modules=1000, steps=200))


@pytest.mark.parametrize("style", ["terminal", "md", "html", "json", "junit"])
def test_a_report_of_four_hundred_thousand_samples_stays_small(run: Path, style: str) -> None:
    """Peak memory of the whole command, trace reading included, and no torch anywhere."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, "report", str(run), "--format", style],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=True,
    )
    used = json.loads(done.stderr.splitlines()[-1])
    assert done.stdout
    assert used["megabytes"] <= MEGABYTES
    assert used["known"] == []
