"""What tinylab adds to dtypedoctor. Nothing here imports torch."""

import csv
import io
from collections.abc import Sequence

from dtypedoctor.plugins import Correction, Format, Model, Workload
from dtypedoctor.report.model import Report

MODEL = Model(name="tinylab-gated", build="tinylab.model:build")

WORKLOAD = Workload(name="tinylab-score", run="tinylab.score:run")

CORRECTION = Correction(
    id="tinylab-gate-float32",
    summary="compute tinylab's gated product and its projection in float32",
    install="tinylab.correction:install",
    fixes=(("float16-overflow", "GatedLayer"),),
    proves=("float16-overflow",),
    prefer="the run has to stay in float16",
)


def render(report: Report) -> str:
    """One line for each finding."""
    return merge([report])


def merge(reports: Sequence[Report]) -> str:
    """One line for each finding of each report."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["run", "finding", "module", "step"])
    rows.writerows([report.name, one.id, one.fqn, one.step] for report in reports for one in report.findings)
    return text.getvalue()


FORMAT = Format(name="csv", render=render, merge=merge)
