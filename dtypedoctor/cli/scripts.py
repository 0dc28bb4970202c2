"""What ``exec`` does once its arguments are read: it starts the script, and then imports what reads the trace while that runs."""

import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtypedoctor.errors import DoctorError, UsageError
from dtypedoctor.interruptions import say
from dtypedoctor.redaction.redact import REQUEST
from dtypedoctor.runner.command import Program
from dtypedoctor.runner.directories import RecordFolder, removed_if_refused
from dtypedoctor.runner.process import Guardian, outliving, run_script
from dtypedoctor.trace.ranks import BEFORE

if TYPE_CHECKING:
    from dtypedoctor.examination.results import Treatment
    from dtypedoctor.examination.tried_edits import Attempt
    from dtypedoctor.report.model import Report
    from dtypedoctor.runner.run import Run


def record_script(
    program: Program, folder: RecordFolder, *, capsule_limit: int, rerun: str, tries_edits: bool
) -> "tuple[Report, int]":
    """Runs a user's program once, with this process's streams, and diagnoses it.

    Args:
        program: what to run.
        folder: where everything that is found out is kept. It arrives when the program has ended and the report is written.
        capsule_limit: bytes that the capsule of a failing call may take.
        rerun: how ``exec`` is asked for another run.
        tries_edits: run it again with the edits that may be shown.

    Returns:
        The report, and the program's own exit status as a shell would give it.

    Raises:
        UsageError: there is no such script, or the directory cannot be used. The directory is gone then, unless something else lies in it.
    """
    with guarded(folder) as guardian:
        checkpoints = [word for word in program.args if os.path.isdir(word.partition("=")[2] or word)]
        if checkpoints:  # they are read before the script may change them
            from dtypedoctor.examination.examine import checkpoints_among, stand_out

            static = stand_out(checkpoints_among(checkpoints))
        try:
            run = first_run(program, program.request(capsule_limit), folder, guardian)
        except OSError as error:
            why = f"it cannot be run here: {error.strerror or error}"
            raise UsageError(why, "Free some space, or give another --out.") from error
        from dtypedoctor.examination.examine import examine
        from dtypedoctor.examination.processes import Leading

        treatment = examine(
            program.described(),
            Leading()(run),
            static=static if checkpoints else (),
            capsule_limit=capsule_limit,
            rerun=rerun,
            attempt=edited_runs(program, folder, guardian) if tries_edits else None,
        )
        return finished(treatment, folder)


def edited_runs(program: Program, folder: RecordFolder, guardian: Guardian) -> "Attempt":
    """What runs a program again with some of its files edited, alone, after its first run."""

    def attempt(label: str, edited: Mapping[str, str], seconds: int) -> "Run | str":
        from dtypedoctor.examination.processes import Leading
        from dtypedoctor.runner.view import NoViewError, View

        say("dtypedoctor: running the script again with an edit, in a copy of its files and without network …")
        again = {**program.request(0), "capsule_limit": None, "repeats": "before", "repeatable": True}
        try:
            began = (folder.private / BEFORE / REQUEST).stat().st_mtime
            with View(Path.cwd(), began).before(folder.private / label, edited) as words:
                run = run_script(
                    program.words,
                    again,
                    folder.private / label,
                    live=False,
                    time_limit=min(seconds, program.time_limit),
                    through=words,
                    guardian=guardian,
                )
            return Leading()(run)
        except (NoViewError, DoctorError, OSError) as error:
            return str(error)
        finally:  # what it has shown is in the report
            shutil.rmtree(folder.private / label, ignore_errors=True)

    return attempt


@contextmanager
def guarded(folder: RecordFolder) -> Iterator[Guardian]:
    """Inside, what is run ends with this process, and the record arrives in the end, even if this process is killed."""
    is_moved = folder.private != folder.directory
    guarding = Guardian(folder.private, folder.directory, merge=folder.merge) if is_moved else Guardian()
    with guarding as guardian, arriving(folder), outliving():
        yield guardian


def first_run(program: Program, request: Mapping[str, Any], folder: RecordFolder, guardian: Guardian) -> "Run":
    """Runs a program with this process's streams, terminal and signals."""
    run = run_script(
        program.words,
        request,
        folder.private / "before",
        live=True,
        time_limit=program.time_limit,
        meanwhile=_import_the_rest,
        guardian=guardian,
    )
    # One that raises KeyboardInterrupt by itself has failed.
    if run.exit.asked_to_end == signal.SIGINT and not any(one.trace.samples for one in (run, *run.ranks)):
        raise KeyboardInterrupt
    folder.private.mkdir(exist_ok=True)  # the program may have deleted it
    return run


def finished(treatment: "Treatment", folder: RecordFolder) -> "tuple[Report, int]":
    """The report, which is written into the folder, and the program's own exit status as a shell would give it."""
    from dtypedoctor.cli.reported import reported

    code = treatment.before.exit.code
    folder.reserve()
    return reported(treatment, folder.private, shown=folder.directory), code if code >= 0 else 128 - code


def _import_the_rest() -> None:
    """Imports what reads a trace and shows a report, rules included; the second time there is nothing to do."""
    for name in ("cli.reported", "examination.examine", "report.to_terminal"):
        import_module(f"dtypedoctor.{name}")
    import_module("dtypedoctor.diagnosis.registry").rules()


@contextmanager
def arriving(folder: RecordFolder) -> Iterator[None]:
    """Moves the record to its directory at the end, unless nothing could be run, or nothing was measured before Ctrl-C."""
    try:
        with removed_if_refused(folder.private, folder.directory):
            yield
    finally:
        folder.arrive()
