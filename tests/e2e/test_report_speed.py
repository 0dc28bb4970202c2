"""A large trace becomes a report without much memory and without torch."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE

from dtypedoctor.report.build import write_report
from dtypedoctor.report.to_json import Report, Status
from dtypedoctor.trace.events import End, Header, Root, Site
from dtypedoctor.trace.writer import TraceWriter

pytestmark = pytest.mark.release

MODULES, STEPS = 1000, 200
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
    directory = tmp_path_factory.mktemp("speed") / "run"
    (directory / "before").mkdir(parents=True)
    writer = TraceWriter(directory / "before")
    writer.write(Header(created=1.0, pid=1))
    writer.write(Root(root=0, cls="CausalLM", modules=MODULES, dtypes={"float16": 1}))
    place = {"root": 0, "cls": "Linear", "index": "", "dtype": "float16", "shape": [2, 8]}
    for number in range(MODULES):
        fqn = f"model.layers.{number // 7}.part{number % 7}"
        writer.write(Site(id=number, fqn=fqn, phase="forward", kind="output", **place))
        writer.write(Site(id=MODULES + number, fqn=fqn, phase="backward", kind="grad_output", **place))
    for step in range(1, STEPS + 1):
        for site in range(2 * MODULES):
            writer.write_samples(writer.next_n(), step, step, [(site, 2.0 + math.sin(step + site), 0, 0)])
    writer.write(End(n=writer.next_n(), outcome="completed", steps_completed=STEPS))
    writer.close()
    write_report(directory, Report(name="large", status=Status.HEALTHY, headline="Nothing found."))
    return directory


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
