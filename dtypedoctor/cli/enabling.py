"""What is installed once: ``dtypedoctor skill``, what a coding agent has to know to use the program, and ``enable`` and ``disable``: recording by a
variable of the environment, ``DTYPEDOCTOR=1``, with no command in front of a program.

A ``.pth`` file in this environment's site-packages has every Python process of it look at that variable. What such a process then does is in
``worker/hooked.py``, which is referenced by its path; the first process of a job calls ``job-report`` when it ends.
"""

import shlex
import sys
import sysconfig
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import is_real_directory, parse_json, read_file, reason
from dtypedoctor.interruptions import say
from dtypedoctor.trace.ranks import JOB_FILE, SWITCH

if TYPE_CHECKING:
    from dtypedoctor.runner.command import Program


_HOOK = Path(__file__).resolve().parents[1] / "worker" / "hooked.py"
_NAME = "dtypedoctor-hook.pth"
_MARK = "# Made by `dtypedoctor enable`; `dtypedoctor disable` removes it.\n"
_RUN = """try:
 with open({path!a}, "rb") as hook: code = compile(hook.read(), {path!a}, "exec")
 exec(code, {{"__name__": "dtypedoctor-hook", "__file__": {path!a}}})
except Exception:
 pass"""


def register(app: typer.Typer) -> None:
    """Adds the verbs."""
    app.command(name="skill", epilog="Example:  dtypedoctor skill --install .claude/skills")(skill)
    app.command(name="enable", epilog="Example:  dtypedoctor enable")(enable)
    app.command(name="disable", epilog="Example:  dtypedoctor disable")(disable)
    app.command(name="job-report", epilog="Example:  dtypedoctor job-report runs/train-...")(job_report)


def hook_text() -> str:
    """The ``.pth`` file, ASCII only: Python reads it in the locale's encoding. It executes its line at the start of each process; that
    looks at one variable and never raises."""
    code = _RUN.format(path=str(_HOOK))
    return f"{_MARK}import os; os.environ.get({SWITCH!r}) in (None, '', '0') or exec({code!a})\n"


def _place() -> Path:
    return Path(sysconfig.get_path("purelib")) / _NAME


def enable(
    status: Annotated[bool, typer.Option("--status", help="Only say whether it is enabled; exit 10 if not.")] = False,
) -> int:
    """Let `DTYPEDOCTOR=1 python train.py` and `DTYPEDOCTOR=1 torchrun …` record themselves, in this environment.

    Installs one `.pth` file. Without the variable, a Python process looks at it once and imports nothing.
    """
    place = _place()
    if status:
        enabled = _text_of(place) == hook_text()
        other = f": {place} is of another installation of dtypedoctor; `dtypedoctor enable` replaces it"
        print(f"enabled: {place}" if enabled else f"not enabled{other if _is_ours(place) else ''}")
        return 0 if enabled else 10
    if place.exists() and not _is_ours(place):
        raise UsageError(f"{place}: this file is not dtypedoctor's", "Move it away.")
    try:
        place.write_text(hook_text(), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"{place}: cannot be written ({error.strerror})",
            "Enable it in an environment of your own (python -m venv), or use `dtypedoctor exec` in front of the program.",
        ) from error
    say(f"enabled: {place}\nNext: {SWITCH}=1 python train.py")
    return 0


def disable() -> int:
    """Remove what `enable` has installed."""
    place = _place()
    if not place.exists():
        say("not enabled")
        return 0
    if not _is_ours(place):
        raise UsageError(f"{place}: this file is not dtypedoctor's", "Nothing was removed.")
    try:
        place.unlink()
    except OSError as error:
        raise UsageError(f"{place}: cannot be removed ({error.strerror})", "Remove it yourself.") from error
    say(f"removed: {place}")
    return 0


def _is_ours(place: Path) -> bool:
    return _text_of(place).startswith(_MARK)


def _text_of(place: Path) -> str:
    try:
        return place.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def job_report(
    directory: Annotated[Path, typer.Argument(help="Run directory of the job.", metavar="RUN")],
    to: Annotated[Path | None, typer.Option("--to", hidden=True, help="Where to move it.")] = None,
) -> int:
    """Write the report of a `DTYPEDOCTOR=1` job again.

    The first process of a job does that when it ends; a job that was killed has none yet.
    """
    from dtypedoctor.cli.output import announce, console_for, left_in

    announce(f"Reading {directory}", terminal_only=True)
    from dtypedoctor.cli.reported import exit_code, kept, next_command
    from dtypedoctor.examination.capsules import CAPSULE_LIMIT
    from dtypedoctor.examination.examine import checkpoints_among, examine, stand_out
    from dtypedoctor.examination.processes import Leading
    from dtypedoctor.redaction.redact import without_process_secrets
    from dtypedoctor.report.build import REPORT_JSON, REPORT_MD, build_report
    from dtypedoctor.report.first_screen import print_first_screen
    from dtypedoctor.runner.directories import RecordFolder
    from dtypedoctor.runner.process import collect_job
    from dtypedoctor.runner.run import WorkerExit
    from dtypedoctor.trace.ranks import BEFORE

    told = _read_job(directory)
    if not is_real_directory(directory / BEFORE):  # where files are written, too
        raise UsageError(f"{directory / BEFORE}: no directory with the records of a job", "Give its run directory.")
    words = told["argv"][1:]
    ended = WorkerExit(code=int(told["failed"]), timed_out=False, seconds=0.0)
    run = collect_job(directory / BEFORE, ended)
    program = _program(words)
    treatment = examine(
        program.described(),
        Leading()(run),
        static=stand_out(checkpoints_among(program.args)),
        capsule_limit=CAPSULE_LIMIT,
        rerun="dtypedoctor exec --rerun",
    )
    folder = RecordFolder(directory, to) if to is not None else None
    if folder is not None:
        folder.reserve()
    shown = folder.directory if folder is not None else directory
    report = build_report(
        treatment,
        command=f"{SWITCH}=1 {shlex.join(without_process_secrets(['python', *words]))}",
        files={"report": REPORT_JSON, "markdown": REPORT_MD, "before": BEFORE},
        next_command=next_command(treatment, directory, shown),
    )
    kept(directory, report)
    if folder is not None:
        folder.arrive()
        directory = folder.directory
    print_first_screen(report, console_for(sys.stderr), str(directory), left_in(directory))
    return exit_code(report)


def _read_job(directory: Path) -> dict[str, Any]:
    try:
        told = parse_json(read_file(directory / JOB_FILE))
        return {"argv": list(map(str, told["argv"])), "failed": bool(told["failed"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = "" if isinstance(error, FileNotFoundError) else f" (job.json: {reason(error)})"
        raise UsageError(f"{directory}: no job has ended here{why}", "Give the run directory of a job.") from error


def _program(words: list[str]) -> "Program":
    """The job's script, and the launcher in front of that where it has one."""
    from dtypedoctor.runner.command import OF_A_SCENARIO, Program, name_of

    while words and words[0].startswith("-") and words[0] not in ("-", "-m", "-c"):
        words = words[1:]  # options of the interpreter
    script, *arguments = words or ["-"]
    target: dict[str, Any] = {"path": script, "args": arguments}
    if script in ("-m", "-c"):
        target = {"module" if script == "-m" else "code": arguments[0], "args": arguments[1:]}
    return Program(name=name_of(target), time_limit=OF_A_SCENARIO, **target)


_SKILL = "dtypedoctor"
_IN_A_PROJECT = Path(".claude", "skills")


def skill(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="With --install: folder of skills; without, the project's .claude/skills, else yours.", metavar="DIR"
        ),
    ] = None,
    install: Annotated[bool, typer.Option("--install", help="Write DIR/dtypedoctor/SKILL.md.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that differs.")] = False,
) -> None:
    """Print what a coding agent has to know to use dtypedoctor, or install it as a skill."""
    text = resources.files("dtypedoctor").joinpath("skills", _SKILL, "SKILL.md").read_text("utf-8")
    if not install:
        if folder is not None or force:
            raise UsageError("skill: nothing is written without --install", "Add --install.")
        print(text, end="")
        return
    place = (folder or _usual_folder()) / _SKILL / "SKILL.md"
    try:
        # Write the file, unless somebody else's, edited or of another version, would be lost
        if not force and place.exists() and place.read_text("utf-8") != text:
            hint = "Give --force to replace it."
            raise UsageError(f"{place}: differs from the skill of this version of dtypedoctor", hint)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, "utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{place}: cannot be written ({reason(error)})", "Give another folder.") from error
    say(f"installed: {place}")


def _usual_folder() -> Path:
    """Where Claude Code looks: in the project that the working directory is in, if it has settings of its own, else at home."""
    here = Path.cwd()
    projects = [folder for folder in (here, *here.parents) if (folder / ".claude").is_dir() and folder != Path.home()]
    return (projects[0] if projects else Path.home()) / _IN_A_PROJECT
