"""``dtypedoctor compare``: two runs of the same model, side by side."""

import shlex
import sys
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from dtypedoctor.cli.output import TERMINAL, FormatOption, show
from dtypedoctor.errors import ExitCode, UsageError


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="compare", epilog="Example:  dtypedoctor compare runs/float16 runs/float16/reference")(compare)


def compare(
    run_a: Annotated[
        Path, typer.Argument(help="Run directory, one of its parts (RUN/reference), or a trace.", metavar="RUN_A")
    ],
    run_b: Annotated[Path, typer.Argument(help="The run to compare it with.", metavar="RUN_B")],
    tolerance: Annotated[
        float | None,
        typer.Option(
            "--tolerance",
            help="Largest relative error that counts as equal; 0: every recorded digit.",
            show_default="expected rounding error, from dtype, length of sums and steps",
        ),
    ] = None,
    format: FormatOption = TERMINAL,
) -> int:
    """Compare two runs of the same model, module by module and step by step.

    They may differ in dtype, device, library versions or attention implementation; all differences are listed. Exits 0 if
    they are equal within the tolerance, 10 if they diverge or if one lacks what the other has measured.
    """
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.report.comparison_document import comparison_document
    from dtypedoctor.runner.run import open_run
    from dtypedoctor.trials.compare import compare_runs
    from dtypedoctor.trials.comparison import Verdict

    if tolerance is not None and not (isfinite(tolerance) and tolerance >= 0):
        raise UsageError(f"--tolerance {tolerance}: not a relative error", "Use a number of at least 0, such as 0.01.")
    found = compare_runs(open_run(run_a), open_run(run_b), tolerance)
    show(comparison_document(found if format == TERMINAL else redact(found)), format)
    if format == TERMINAL:
        again = shlex.join(["dtypedoctor", "compare", str(run_a), str(run_b), "--format", "md"])
        print(f"\nNext: {again}", file=sys.stderr)
    return int(ExitCode.OK if found.verdict is Verdict.EQUAL else ExitCode.FINDINGS)
