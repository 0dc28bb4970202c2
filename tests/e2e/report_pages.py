"""A page of every kind that the command line shows, written without running a model."""

from dataclasses import replace
from pathlib import Path

from command import dtypedoctor
from run_directories import failing_report, failing_run, mismatched_run

from dtypedoctor.diagnosis.checkpoint import StaticTensor, Subject
from dtypedoctor.report.files import read_report
from dtypedoctor.report.matrix import matrix_document, row_of
from dtypedoctor.report.run_document import bisection_document
from dtypedoctor.report.surveys import Inspection, inspection_document
from dtypedoctor.report.to_html import render_html

BISECTION = {
    "end": "found",
    "workload": "one forward pass",
    "candidates": 44,
    "culprits": ["model.layers.1.mlp::self"],
    "probes": 14,
    "one_minimal": True,
    "flaky": ["the whole model"],
    "verdicts": [
        {"mode": mode, "workload": "one forward pass", "outcome": outcome, "phase": "forward", "step": 1, "fqn": "model.layers.1.mlp", "absmax": 9e4}
        for mode, outcome in (("one forward pass", "fail"), ("float32", "pass"), ("compiled", "unresolved"))
    ],
    "remedy": {"corrections": [{"id": "keep-float32", "modules": ["model.layers.1.mlp::self"]}]},
    "reproduction": {"script": "repro.py", "bytes": 65920, "said": "FAILS: inf"},
}  # fmt: skip


def render(directory: Path) -> Path:
    """Renders a run directory through the command line."""
    done = dtypedoctor("report", directory, "--format", "html")
    assert done.code == 0, done.err
    page = directory / "report.html"
    page.write_text(done.out, encoding="utf-8")
    return page


def every_kind(folder: Path) -> list[Path]:
    """The pages of runs, a matrix, a bisection, a comparison, an inspection and the environment."""
    runs = [failing_run(folder / "overflow"), mismatched_run(folder / "mismatch")]
    reports = [read_report(run) for run in runs]
    rows = [row_of(report, exit_code=10, seconds=1.0, path="report.json") for report in reports]
    tensors = tuple(
        StaticTensor(name=f"layers.{i}.weight", dtype=dtype, shape=(4, 4))
        for i, dtype in enumerate(("float16", "float32"))
    )
    inspected = Inspection(subject=Subject(name="checkpoint", tensors=tensors), findings=failing_report().findings)
    documents = {
        "matrix": matrix_document(rows, reports, exit_code=10),
        "bisection": bisection_document(replace(failing_report(), bisection=BISECTION)),
        "inspection": inspection_document(inspected),
    }
    pages = {name: render_html(document) for name, document in documents.items()}
    pages["comparison"] = dtypedoctor("compare", runs[0], runs[1], "--format", "html").out
    pages["environment"] = dtypedoctor("env", "--format", "html").out
    for name, page in pages.items():
        (folder / f"{name}.html").write_text(page, encoding="utf-8")
    return [*map(render, runs), *(folder / f"{name}.html" for name in pages)]
