"""The `dtypedoctor` command: verbs, options that all of them share, and the one place where errors become exit codes."""

import errno
import os
import re
import signal
import sys
import traceback
from copy import copy
from importlib import import_module
from typing import Annotated

import typer

from dtypedoctor.cli.output import lost_output, standard_streams
from dtypedoctor.errors import INTERRUPTED, DoctorError, ExitCode
from dtypedoctor.foreign_files import working_directory
from dtypedoctor.interruptions import HEARD
from dtypedoctor.text import paragraphs
from dtypedoctor.version import __version__

_PLACED = re.compile(r"\S+:\d+:\d+: ")
"""How a message begins that says its own place; editors jump to it."""

_LONGEST = 100_000
"""Characters of a message that are shown."""
_LONGEST_PATH = 500
"""Characters of an error of the system, which ends in the whole path."""
_NO_PLACE = (
    errno.ENAMETOOLONG,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.ELOOP,
    errno.ENOTDIR,
)
"""What the system says of a folder that nothing can be written to."""


def _typed(name: str) -> str:
    """Write the name of an option, typed without its dashes, as the program has it: like torchrun, it takes ``_`` for ``-``."""
    return name.replace("_", "-")


app = typer.Typer(
    name="dtypedoctor",
    help="Find, explain and fix mixed-precision failures in PyTorch training, and prove each fix by running again.",
    epilog="Begin with:  dtypedoctor exec train.py",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": _typed},
)
_VERBS = {
    "dtypedoctor.cli.exec": ("exec",),
    "dtypedoctor.cli.reading": ("report", "explain", "inspect", "env"),
    "dtypedoctor.lab.cli.run": ("run", "bisect"),
    "dtypedoctor.lab.cli.treat": ("treat",),
    "dtypedoctor.lab.cli.audit": ("audit",),
    "dtypedoctor.lab.cli.verify": ("verify",),
    "dtypedoctor.lab.cli.parity": ("parity",),
    "dtypedoctor.lab.cli.replay": ("replay",),
    "dtypedoctor.lab.cli.reading": ("compare", "scenarios"),
    "dtypedoctor.cli.enabling": ("enable", "disable", "job-report", "skill"),
}
"""The verbs of each module, which is imported for its own verbs, and for help."""


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
    """Runs the command line and exits with the code that DESIGN gives each outcome, whether or not anybody reads what it prints."""
    with standard_streams():
        code = _outcome()
        lost = lost_output()
        if lost is not None:
            _complain(f"standard output cannot be written: {lost.strerror}", _hint(lost, ""))
            code = int(ExitCode.USAGE) if code in (ExitCode.OK, ExitCode.FINDINGS) else code
    # Names the plug-ins that this command has tried to use and could not; it imports nothing to do so
    plugins = sys.modules.get("dtypedoctor.plugins")
    for one in plugins.left_out() if plugins is not None else ():
        _complain(f"{one.what} is not used: {one.why}", "")
    sys.exit(code)


def with_verb(verb: str) -> typer.Typer:
    """The command line with this verb alone, all if there is no such verb: the options of every one take longer to make than those of one."""
    narrowed = copy(app)
    narrowed.registered_commands = []
    modules = [module for module, verbs in _VERBS.items() if verb in verbs]
    for module in modules or _VERBS:
        import_module(module).register(narrowed)
    if modules:
        narrowed.registered_commands = [one for one in narrowed.registered_commands if one.name == verb]
    return narrowed


def _outcome() -> int:
    HEARD.clear()
    try:
        if f"_{app.info.name}_complete".upper() not in os.environ:
            status = _run(with_verb(next(iter(sys.argv[1:]), "")))
        else:
            status = with_verb("")(standalone_mode=False)
        return int(status) if isinstance(status, int) else int(ExitCode.OK)
    except DoctorError as error:
        _complain(error.message, _hint(error, error.hint))
        return int(error.exit_code)
    except KeyboardInterrupt as error:
        return _interrupted(error)
    except Exception as error:  # noqa: BLE001  (the one place where nothing may escape)
        return _interrupted(KeyboardInterrupt()) if HEARD else _unexpected(error)


def _run(narrowed: typer.Typer) -> object:
    """Runs the verb. typer's own way of doing it makes an exit code of Ctrl-C, without a word."""
    command = typer.main.get_command(narrowed)
    try:
        with command.make_context(app.info.name, sys.argv[1:]) as context:
            return command.invoke(context)
    except typer.Exit as over:
        return over.exit_code


def _interrupted(error: KeyboardInterrupt) -> int:
    """From here on the command only ends: once more Ctrl-C would interrupt that in the middle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _complain(str(error) or "interrupted", "")
    return INTERRUPTED


def _unexpected(error: Exception) -> int:
    """Usage errors of the parser end with 2; anything else is a defect of ours and shows its traceback."""
    exit_code = getattr(error, "exit_code", None)
    show = getattr(error, "show", None)
    if callable(show):
        show()
        return int(exit_code) if exit_code is not None else int(ExitCode.USAGE)
    if hint := _hint(error, ""):
        _complain(f"this command cannot run here: {paragraphs(str(error), _LONGEST_PATH)}", hint)
        return int(ExitCode.USAGE)
    print(paragraphs(traceback.format_exc(), _LONGEST), file=sys.stderr)
    _complain(f"dtypedoctor itself failed: {type(error).__name__}: {error}", "Please report this with the lines above.")
    return int(ExitCode.INTERNAL)


def _hint(error: BaseException, hint: str) -> str:
    """What to do about an error: ``hint``, unless what the command runs in is at fault, which whatever raised has not looked at."""
    if working_directory() is None:
        return "The working directory no longer exists: change to one that does."
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE):
            return "Raise the limit of open files, for example with `ulimit -n 4096`."
        if isinstance(cause, OSError) and cause.errno in _NO_PLACE:
            return "Give another place that has room and is no link, by DTYPEDOCTOR_RUNS, or by --out where the command has it."
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return hint


def _complain(message: str, hint: str) -> None:
    """Says what is wrong. Messages quote files of others, whose escape sequences would reach the terminal."""
    message, hint = paragraphs(message, _LONGEST), paragraphs(hint, _LONGEST)
    print(message if _PLACED.match(message) else f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


if __name__ == "__main__":
    main()
