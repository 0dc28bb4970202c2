"""``dtypedoctor env``: what the runs of this machine run on."""

import sys

import typer

from dtypedoctor.cli.formats import TERMINAL, FormatOption, show


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="env", epilog="Example:  dtypedoctor env --format md")(env)


def env(
    format: FormatOption = TERMINAL,
) -> None:
    """Print versions, devices, driver and the environment variables that matter, for a ticket.

    It is the table that every report carries, and what `torch.utils.collect_env` adds. Nothing private is in it.
    """
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.report.environment import environment_document
    from dtypedoctor.runner.machine import survey

    show(
        environment_document(redact(survey())), format
    )  # it is read to be passed on, so nothing private is in it at the prompt either
    if format == TERMINAL:
        print("\nNext: dtypedoctor run gemma4_grpo_fp16", file=sys.stderr)
