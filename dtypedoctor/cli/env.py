"""``dtypedoctor env``: versions, devices and settings that matter, for an issue."""

import sys

import typer

from dtypedoctor.cli.output import TERMINAL, FormatOption, show


def register(app: typer.Typer) -> None:
    """Adds the verb."""
    app.command(name="env", epilog="Example:  dtypedoctor env --format md")(env)


def env(
    format: FormatOption = TERMINAL,
) -> None:
    """Print versions, devices, driver and the environment variables that matter, to paste into an issue.

    It is the environment table of every report plus what `torch.utils.collect_env` adds, without anything private.
    """
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.report.environment import environment_document
    from dtypedoctor.runner.machine import survey

    # it is printed to be pasted elsewhere, so it is redacted at the prompt, too
    show(environment_document(redact(survey())), format)
    if format == TERMINAL:
        print("\nNext: dtypedoctor run gemma4_grpo_fp16", file=sys.stderr)
