"""What tinylab adds to dtypedoctor. Nothing here imports torch."""

import csv
import io

from dtypedoctor.plugins import Correction, Format, Model, Workload
from dtypedoctor.report.document import Document

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


def render(document: Document) -> str:
    """One line for each finding of each run."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(["run", "finding", "module", "step"])
    for run in document.parts or (document,):
        rows.writerows([run.name, one["id"], one["fqn"], one["step"]] for one in run.data().get("findings", ()))
    return text.getvalue()


FORMAT = Format(name="csv", suffix=".csv", render=render)
