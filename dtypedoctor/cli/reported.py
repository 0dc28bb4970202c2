"""How a command that has run something ends: its report is kept beside the runs, and stands for an exit code."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from shutil import which

from dtypedoctor.diagnosis.rule import Severity
from dtypedoctor.errors import ExitCode
from dtypedoctor.examination.results import NOT_REQUESTED, Outcome, Treatment
from dtypedoctor.interruptions import say
from dtypedoctor.redaction.redact import without_process_secrets
from dtypedoctor.replay.capsule import Capsule
from dtypedoctor.replay.own import is_own
from dtypedoctor.report.build import REPORT_JSON, REPORT_MD, build_report, write_report
from dtypedoctor.report.run_facts import PATCH
from dtypedoctor.report.to_json import Report, Status
from dtypedoctor.runner.run import STDERR, STDOUT
from dtypedoctor.trace.ranks import member

ENDINGS: tuple[tuple[str, Callable[[Report], bool], ExitCode], ...] = (
    ("no usable trace, and no finding without one", lambda r: not (r.trace_usable or r.findings), ExitCode.NO_TRACE),
    ("fails and is fixed as the scenario says", lambda r: r.expectation_met is True, ExitCode.OK),
    ("not what the scenario says", lambda r: r.expectation_met is False, ExitCode.FINDINGS),
    ("a bisection of what fails", lambda r: r.bisection is not None and r.bisection["end"] != "healthy", ExitCode.FINDINGS),
    ("a finding that is more than a note", lambda r: any(f.severity is not Severity.INFO for f in r.findings), ExitCode.FINDINGS),
    ("killed, stopped, raised, status not 0, not measured", lambda r: r.status is not Status.HEALTHY, ExitCode.FINDINGS),
    ("differs without instrumentation", lambda r: r.observer.bitwise_equal is False, ExitCode.FINDINGS),
    ("nothing wrong", lambda r: True, ExitCode.OK),
)  # fmt: skip
"""How a run ends, in the order in which it is decided, and the exit code of the command."""


def exit_code(report: Report) -> int:
    """The exit code that a finished report stands for: that of the first line of :data:`ENDINGS` that holds."""
    return int(next(code for _, holds, code in ENDINGS if holds(report)))


def reported(
    treatment: Treatment, directory: Path, shown: Path | None = None, *, patch: str = "", applied: bool = False
) -> Report:
    """The report of a finished treatment, which is also written into ``directory``.

    Args:
        treatment: what was found out.
        directory: of the run.
        shown: what the report names in its place, since the directory is going to be moved there.
        patch: the file in it that has the edits already; empty for one that is written with the report.
        applied: whether the program has the edits already.
    """
    shown = directory if shown is None else shown
    files = {"report": REPORT_JSON, "markdown": REPORT_MD, "before": "before"}
    for key, name in (("raw_stdout", STDOUT), ("raw_stderr", STDERR)):
        kept_output = directory / "before" / name
        if kept_output.exists() and kept_output.stat().st_size:
            files[key] = files["raw_output"] = f"before/{name}"
    if patch:
        files["patch"] = patch
    if (directory / "server.log").exists():
        files["log"] = "server.log"
    report = build_report(
        treatment,
        command=shlex.join(without_process_secrets(["dtypedoctor", *sys.argv[1:]])),
        files=files,
        next_command=next_command(treatment, directory, shown),
    )
    following = _next_of_script(report, shown, treatment.rerun, fixed=bool(patch)) or report.next_command
    following = as_typed_here(following)
    if report.asks_for_edit and report.do_this[0].edits and not applied and "dtypedoctor exec " in following:
        following = f"patch -p0 < {shlex.quote(str(shown / (patch or PATCH)))} && {following}"
    return kept(directory, replace(report, next_command=following))


def as_typed_here(command: str) -> str:
    """A command of dtypedoctor as it works in this shell: by the interpreter that runs now where no other name finds the same installation."""
    name = "dtypedoctor"
    here = Path(sys.executable).parent
    found = which(name)
    if not command.startswith(f"{name} ") or (found is not None and Path(found).parent == here):
        return command
    python = which("python")
    word = "python" if python is not None and Path(python).parent == here else shlex.quote(sys.executable)
    return f"{word} -m {command}"


def _next_of_script(report: Report, directory: Path, rerun: str = "", *, fixed: bool = False) -> str:
    """What runs a script again after the edit that the report shows, or with the options by which it would tell more, or with the first fix that can
    be tried on it; empty where there is none of that.
    """
    if member() is not None:  # one of several: only their launcher can start them again
        return f"dtypedoctor report {shlex.quote(str(directory.parent))}"
    verb = "dtypedoctor exec "
    if not report.command.startswith(verb):
        return ""
    words, options = _without_out(shlex.split(report.command), directory), rerun.partition(": ")[0]
    # After --fix nothing is left that it would try, and before it --once is the only option that does not go with it
    for option in ("--fix", "--in-place") if fixed else ("--once",) if options == "--fix" else ():
        if option in words:
            words.remove(option)
    if report.asks_for_edit:
        return shlex.join(_without_reruns(words))
    again = shlex.join(words)
    program = again.removeprefix(verb)
    if options and " N " not in options:  # nobody but its launcher knows how many processes
        return f"{verb}{options} {program}"
    nothing_was_tried = all(trial.outcome is Outcome.NOT_TRIED for trial in report.trials)
    for trial in report.trials if nothing_was_tried else ():
        if trial.reason.startswith(f"{NOT_REQUESTED}: --try "):
            return f"{verb}--try {trial.remedy} {program}"
    return ""


_RERUNS = {"--rerun": 1, "--verify-uninstrumented": 1, "--try": 2, "--ablate": 2}
"""Options of ``exec`` that ask for further runs, and the words of each."""


def _without_reruns(words: list[str]) -> list[str]:
    """The words of a command without the options at its begin that ask for further runs: of the edited program they would make the same again."""
    verb, options = words[:2], words[2:]
    while options and options[0] in _RERUNS:
        options = options[_RERUNS[options[0]] :]
    return [*verb, *options]


def _without_out(words: list[str], directory: Path) -> list[str]:
    """The words of a command without ``--out DIRECTORY``: a run directory is never overwritten."""
    for at, word in enumerate(words):
        if word == f"--out={directory}":
            return [*words[:at], *words[at + 1 :]]
        if words[at : at + 2] == ["--out", str(directory)]:
            return [*words[:at], *words[at + 2 :]]
    return words


def next_command(treatment: Treatment, directory: Path, shown: Path) -> str:
    """What helps now, as it is typed, with ``shown`` for ``directory``; empty where nothing was found.

    Where a fix of the run is known, that is what prints the report for an issue; else what tries fixes on the failing call, where it was
    kept; else the page of the finding.
    """
    capsule = treatment.capsule
    if any(trial.outcome is Outcome.FIXED for trial in treatment.trials):
        return f"dtypedoctor report {shlex.quote(str(shown))} --format md"
    if not isinstance(capsule, Capsule):
        return f"dtypedoctor explain {treatment.findings[0].id}" if treatment.findings else ""
    option = " --allow-code" if any(capsule.code()) and not is_own(capsule.directory) else ""
    return f"dtypedoctor replay {shlex.quote(str(shown / capsule.directory.relative_to(directory)))}{option}"


def kept(directory: Path, report: Report) -> Report:
    """Writes ``report`` into ``directory``, or says on stderr why that cannot be done."""
    try:
        write_report(directory, report)
    except OSError as error:  # the disk is full, or the directory is gone: it can still be shown
        say(f"dtypedoctor: cannot write the report to {directory}: {error.strerror}")
    return report
