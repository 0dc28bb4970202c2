"""``dtypedoctor env``: what the runs of this machine run on."""

import sys
from enum import StrEnum
from typing import Annotated

import typer


class Format(StrEnum):
    """The formats of ``dtypedoctor.report.environment_formats``, named here so that ``--help`` need not import them."""

    TERMINAL = "terminal"
    MD = "md"
    JSON = "json"


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="env", epilog="Example:  dtypedoctor env --format md")(env)


def env(
    format: Annotated[Format, typer.Option("--format", "-f", help="What to print.")] = Format.TERMINAL,
) -> None:
    """Print versions, devices, driver and the environment variables that matter, for a ticket.

    It is the table that every report carries, and what `torch.utils.collect_env` adds. Nothing private is in it.
    """
    from dtypedoctor.cli.console import console_for
    from dtypedoctor.cli.standard_streams import write_document
    from dtypedoctor.report.environment_formats import ENVIRONMENT_RENDERERS, render_environment
    from dtypedoctor.runner.survey import survey

    found = survey()
    if format is Format.TERMINAL:
        render_environment(found, console_for(sys.stdout))
        print("\nNext: dtypedoctor run gemma4_grpo_fp16", file=sys.stderr)
    else:
        write_document(ENVIRONMENT_RENDERERS[format.value](found))
