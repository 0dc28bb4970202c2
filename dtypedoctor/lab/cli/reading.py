"""The verbs of the laboratory that start no run: they compare two finished ones, list scenarios and check their files."""

import json
import shlex
from math import isfinite
from pathlib import Path
from typing import Annotated

import typer

from dtypedoctor.cli.output import TERMINAL, FormatOption, announce, show
from dtypedoctor.errors import ExitCode, UsageError
from dtypedoctor.interruptions import say


def register(app: typer.Typer) -> None:
    """Adds the verbs."""
    app.command(name="compare", epilog="Example:  dtypedoctor compare runs/float16 runs/float16/reference")(compare)
    app.command(name="scenarios", epilog="Example:  dtypedoctor scenarios --schema > scenario.schema.json")(scenarios)


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
    announce(f"Comparing {run_a} with {run_b}", terminal_only=True)
    from dtypedoctor.lab.compare.compare import compare_runs
    from dtypedoctor.lab.compare.comparison import Verdict
    from dtypedoctor.lab.compare.document import comparison_document
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.runner.run import open_run

    if tolerance is not None and not (isfinite(tolerance) and tolerance >= 0):
        raise UsageError(f"--tolerance {tolerance}: not a relative error", "Use a number of at least 0, such as 0.01.")
    found = compare_runs(open_run(run_a), open_run(run_b), tolerance)
    show(comparison_document(found if format == TERMINAL else redact(found)), format)
    if format == TERMINAL:
        places = [f"./{run}" if str(run).startswith("-") else str(run) for run in (run_a, run_b)]
        again = shlex.join(["dtypedoctor", "compare", *places, "--format", "md"])
        say(f"\nNext: {again}")
    return int(ExitCode.OK if found.verdict is Verdict.EQUAL else ExitCode.FINDINGS)


def scenarios(
    files: Annotated[
        list[Path] | None,
        typer.Argument(help="Scenario files to check, without running them.", metavar="[FILE]...", show_default=False),
    ] = None,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON Schema of scenario files, for editors, and exit.")
    ] = False,
) -> int:
    """List the built-in scenarios, or check scenario files; exits 2 if there is a mistake in one."""
    from dtypedoctor.lab.cli.scenario_files import load_checked
    from dtypedoctor.lab.scenarios.loading import available, json_schema

    if schema:
        print(json.dumps(json_schema(), indent=2))
        return int(ExitCode.OK)
    if files:
        # Prints the mistakes of all files, each with its line
        from dtypedoctor.text import counted, paragraphs

        wrong = 0
        for file in files:
            try:
                load_checked(file, allow_code=True)  # nothing is run
            except UsageError as error:
                wrong += 1
                say(paragraphs("\n".join(filter(None, (error.message, error.hint))), 10_000))
        print(f"{counted(len(files), 'scenario file')} checked, {wrong or 'none'} with mistakes")
        return int(ExitCode.USAGE if wrong else ExitCode.OK)
    found = [load_checked(path, allow_code=True) for path in available()]
    width = max((len(s.name) for s in found), default=0)
    for scenario in found:
        print(f"{scenario.name:<{width}}  {scenario.summary}")
    say("\nNext: dtypedoctor run NAME")
    return int(ExitCode.OK)
