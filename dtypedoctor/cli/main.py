"""The `dtypedoctor` command: verbs, options that all of them share, and the one place where errors become exit codes."""

import errno
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from dtypedoctor.cli.output import current_name, lost_output, standard_streams
from dtypedoctor.errors import INTERRUPTED, DoctorError, ExitCode, UsageError
from dtypedoctor.foreign_files import read_head, working_directory
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

app = typer.Typer(
    name="dtypedoctor",
    help="Find, explain and fix mixed-precision failures in PyTorch training, and prove each fix by running again.",
    epilog="Begin with:  dtypedoctor run gemma4_grpo_fp16",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": current_name},
)
_VERBS = {
    "dtypedoctor.lab.cli.run": ("run", "bisect"),
    "dtypedoctor.cli.exec": ("exec",),
    "dtypedoctor.lab.cli.treat": ("treat",),
    "dtypedoctor.lab.cli.replay": ("replay",),
    "dtypedoctor.cli.reading": ("inspect", "report", "explain", "env"),
    "dtypedoctor.lab.cli.reading": ("compare", "scenarios"),
    "dtypedoctor.cli.enabling": ("enable", "disable", "job-report"),
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
    # Names the plug-ins that this command has tried to use and could not, and likely typos in others; it imports nothing to do so
    plugins = sys.modules.get("dtypedoctor.plugins")
    for one in plugins.left_out() if plugins is not None else ():
        _complain(f"{one.what} is not used: {one.why}", "")
    for text in plugins.remarks() if plugins is not None else ():
        print(f"warning: {paragraphs(text, _LONGEST)}", file=sys.stderr)
    sys.exit(code)


def _options_of(verb: str) -> dict[str, bool]:
    """The options of a verb as they are typed, and whether each is a flag; none where there is no such verb."""
    command = typer.main.get_group(with_verb(verb)).commands.get(verb)
    if command is None:
        return {}
    return {option: bool(getattr(one, "is_flag", False)) for one in command.params for option in one.opts}


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
            sys.argv[1:] = with_project_defaults(sys.argv[1:], _options_of)
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
            return "Give another folder: --out, or `runs` of [tool.dtypedoctor] in pyproject.toml."
        cause = cause.__cause__ or cause.__context__
    return hint


def _complain(message: str, hint: str) -> None:
    """Says what is wrong. Messages quote files of others, whose escape sequences would reach the terminal."""
    message, hint = paragraphs(message, _LONGEST), paragraphs(hint, _LONGEST)
    print(message if _PLACED.match(message) else f"error: {message}", file=sys.stderr)
    if hint:
        print(f"hint: {hint}", file=sys.stderr)


_FILE = "pyproject.toml"
RUNS = "runs"
"""The key that is no option: the folder in which run directories are made."""
RUNS_VARIABLE = "DTYPEDOCTOR_RUNS"
KEYS = (
    "capsule-limit",
    "overhead-budget",
    "every-n-steps",
    "time-limit",
    "verify-uninstrumented",
    "propagate-exit",
    "device",
    "format",
)
"""The options that can be set."""
_REPLACES = {
    "every-n-steps": ("overhead-budget",),
    "overhead-budget": ("every-n-steps",),
    "resume": KEYS,
}
"""The keys that do not count where an option is typed that cannot stand beside them."""
_TABLE = b"[tool.dtypedoctor]"
_LARGEST = 1 << 20
"""Bytes of a ``pyproject.toml``, which every verb reads."""


def with_project_defaults(words: Sequence[str], options_of: Callable[[str], Mapping[str, bool]]) -> list[str]:
    """The command line with the defaults of the project in it.

    Args:
        words: what was typed, without the program: the verb first.
        options_of: the options of a verb, as they are typed, and whether each is a flag; asked only where there is a table.

    Raises:
        UsageError: the table has a key or a value that cannot be used, or the file is no TOML.
    """
    found = _nearest() if words and not words[0].startswith("-") else None
    if found is None:
        return list(words)
    path, settings = found
    verb, *rest = words
    if RUNS in settings:
        os.environ.setdefault(RUNS_VARIABLE, str(path.parent / settings[RUNS]))
    options = options_of(verb)
    replaced = _replaced(rest, options)
    usable = {key: value for key, value in settings.items() if f"--{key}" in options and key not in replaced}
    return [verb, *_as_options(path, usable, options), *rest]


def _replaced(words: Sequence[str], options: Mapping[str, bool]) -> set[str]:
    """The keys that what was typed excludes."""
    typed = {current_name(word.partition("=")[0].removeprefix("--")) for word in words if word.startswith("--")}
    return {key for name in typed if f"--{name}" in options for key in _REPLACES.get(name, ())}


def _nearest() -> tuple[Path, dict[str, Any]] | None:
    """The ``pyproject.toml`` of the working directory or the nearest one above it that has such a table, and the table."""
    try:
        folder = Path.cwd()
        owners = {0, os.getuid(), folder.stat().st_uid}
    except OSError:  # the directory was removed
        return None
    for place in (folder, *folder.parents):
        path = place / _FILE
        try:
            # In a folder that others can write to, such as /tmp, it would decide where their neighbors' runs are kept.
            content = read_head(path, _LARGEST + 1, follow=True) if path.stat().st_uid in owners else b""
        except OSError:  # there is none, or it is no regular file
            continue
        if _TABLE in content and len(content) > _LARGEST:
            raise UsageError(f"{path}: larger than {_LARGEST >> 20} MiB", "Settings are a few lines; make it smaller.")
        settings = _settings(path, content) if _TABLE in content else None
        if settings is not None:
            return path, settings
    return None


def _settings(path: Path, content: bytes) -> dict[str, Any] | None:
    """The table; None where it is only mentioned, in a comment or a text.

    Raises:
        UsageError: the file is no TOML, or a key is unknown.
    """
    import tomllib

    from dtypedoctor.text import did_you_mean

    try:
        tool = tomllib.loads(content.decode("utf-8")).get("tool")
    except (ValueError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else error
        raise UsageError(f"{path}: cannot be read: {why}", "It must be TOML, in UTF-8.") from None
    settings = tool.get("dtypedoctor") if isinstance(tool, dict) else None
    if not isinstance(settings, dict):
        return None
    known = (RUNS, *KEYS)
    for key in settings:
        if key not in known:
            meant = did_you_mean(key, known)
            raise UsageError(f"{path}: [tool.dtypedoctor]: unknown key {key!r}{meant}", f"Known: {', '.join(known)}.")
    if not isinstance(runs := settings.get(RUNS, ""), str) or "\0" in runs:
        raise UsageError(f"{path}: [tool.dtypedoctor]: {RUNS} must be text, got {runs!r}"[:400])
    return settings


def _as_options(path: Path, settings: Mapping[str, Any], options: Mapping[str, bool]) -> Iterator[str]:
    for key, value in settings.items():
        if options[f"--{key}"]:
            if not isinstance(value, bool):
                raise UsageError(f"{path}: [tool.dtypedoctor]: {key} must be true or false, got {value!r}")
            yield from [f"--{key}"] if value else []
        elif value is True or not isinstance(value, (str, int, float)):
            raise UsageError(f"{path}: [tool.dtypedoctor]: {key} must be text or a number, got {value!r}")
        elif value is not False:
            yield f"--{key}={value}"


if __name__ == "__main__":
    main()
