"""Runs a scenario as a user would and reads its report. pytest runs it where tinylab and dtypedoctor are installed."""

import json
import subprocess
import sys
from pathlib import Path

SCENARIO = Path(__file__).with_name("tinylab_underflow.yaml")


def test_zeros(tmp_path: Path) -> None:
    """The rule finds the zeros in the layer, and both fixes of the rule's spec make them disappear."""
    out = tmp_path / "out"
    subprocess.run([sys.executable, "-m", "dtypedoctor", "run", SCENARIO, "--out", out], check=True)
    report = json.loads((out / "report.json").read_text())
    (finding,) = report["findings"]
    assert (finding["id"], finding["fqn"], finding["confidence"]) == ("tinylab-gate-underflow", "layer", "proven")
    outcomes = {trial["remedy"]: trial["outcome"] for trial in report["trials"]}
    assert outcomes == {"tinylab-gate-float32": "fixed", "bfloat16": "fixed"}
