"""Runs a scenario as a user would and reads its report. pytest runs it where tinylab and dtypedoctor are installed."""

import json
import subprocess
import sys
from pathlib import Path

from tinylab.rule import detect

from dtypedoctor.trace.events import Sample, Site
from dtypedoctor.trace.model import Trace

SCENARIO = Path(__file__).with_name("tinylab_underflow.yaml")


def zeros_from(absmax: float) -> list[str]:
    """The modules in which the rule finds zeros where a gated layer's output reaches ``absmax``."""
    site = Site(
        id=1,
        root=0,
        fqn="layer",
        cls="GatedLayer",
        phase="forward",
        kind="output",
        index="",
        dtype="float16",
        shape=[2],
    )
    sample = Sample(n=1, step=1, call=1, site=1, absmax=absmax, num_nan=0, num_inf=0)
    return [finding.fqn for finding in detect(Trace(records=(), samples=(sample,), sites={1: site}))]


def test_only_zeros_are_found() -> None:
    """A trace can be made by hand, without a run."""
    assert zeros_from(0.0) == ["layer"]
    assert zeros_from(6e-8) == []


def test_zeros(tmp_path: Path) -> None:
    """The rule finds the zeros in the layer, and both fixes of the rule's spec make them disappear."""
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-m", "dtypedoctor", "run", SCENARIO, "--out", out], check=True)
    report = json.loads((out / "report.json").read_text())
    (finding,) = [one for one in report["findings"] if one["id"] == "tinylab-gate-underflow"]
    assert (finding["id"], finding["fqn"], finding["confidence"]) == ("tinylab-gate-underflow", "layer", "proven")
    outcomes = {trial["remedy"]: trial["outcome"] for trial in report["trials"]}
    assert outcomes == {"tinylab-gate-float32": "fixed", "bfloat16": "fixed"}
