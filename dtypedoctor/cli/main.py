"""The `dtypedoctor` command: verbs, options that all of them share, and the one place where errors become exit codes."""

import os
import re
import sys
import traceback
from typing import Annotated

import typer

from dtypedoctor import __version__
from dtypedoctor.cli import bisect, compare, env, exec, explain, inspect, report, run, scenarios
from dtypedoctor.errors import DoctorError, ExitCode

_PLACED = re.compile(r"\S+:\d+:\d+: ")
"""How a message begins that says its own place; editors jump to it."""

app = typer.Typer(
    name="dtypedoctor",
    help="Finds, explains and fixes mixed-precision failures in PyTorch training, and proves the cure by running again.",
    epilog="Begin with:  dtypedoctor run gemma4_grpo_fp16",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for verb in (run, bisect, exec, inspect, report, compare, explain, scenarios, env):
    verb.register(app)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"dtypedoctor {__version__}")
        raise typer.Exit


@app.callback()
def _shared(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options before the verb."""


def main() -> None:
    """Runs the command line and exits with the code that DESIGN gives each outcome."""
    try:
        status = app(standalone_mode=False)
        code = int(status) if isinstance(status, int) else int(ExitCode.OK)
    except DoctorError as error:
        _complain(error.message, error.hint)
        code = int(error.exit_code)
    except KeyboardInterrupt:
        _complain("interrupted", "")
        code = 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader has gone; nothing more can be said to it
        code = int(ExitCode.OK)
    except Exception as error:  # noqa: BLE001  (the one place where nothing may escape)
        code = _unexpected(error)
    sys.exit(code)


def _unexpected(error: Exception) -> int:
    """Usage errors of the parser end with 2; anything else is a defect of ours and shows its traceback."""
    exit_code = getattr(error, "exit_code", None)
    show = getattr(error, "show", None)
    if callable(show):
        show()
        return int(exit_code) if exit_code is not None else int(ExitCode.USAGE)
    traceback.print_exc()
    _complain(f"dtypedoctor itself failed: {type(error).__name__}: {error}", "Please report this with the lines above.")
    return int(ExitCode.INTERNAL)


def _complain(message: str, hint: str) -> None:
    print(message if _PLACED.match(message) else f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


if __name__ == "__main__":
    main()
