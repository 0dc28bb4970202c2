"""What ``exec`` does once its arguments are read: it starts the script, and then imports what reads the trace while that runs."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from dtypedoctor.errors import UsageError
from dtypedoctor.interruptions import say
from dtypedoctor.runner.directories import RecordFolder, remove_unmeasured, remove_unused
from dtypedoctor.runner.process import Guardian, outliving, run_script
from dtypedoctor.scenario.model import Request, Scenario, Script
from dtypedoctor.trials.plan import Plan, first_run

if TYPE_CHECKING:
    from dtypedoctor.report.model import Report
    from dtypedoctor.runner.run import Run
    from dtypedoctor.runner.view import View


def treat_script(
    scenario: Scenario, folder: RecordFolder, plan: Plan, *, in_place: bool = False
) -> "tuple[Report, int]":
    """Treats a user's script; the script has this process's streams the first time it runs.

    Args:
        scenario: what to run.
        folder: where everything that is found out is kept. It arrives when the last run of the script has ended and the report is written.
        plan: how far to go.
        in_place: whether another run may change files of the working directory; else it gets a copy-on-write view of it.

    Returns:
        The report, and the script's own exit status as a shell would give it.

    Raises:
        UsageError: there is no such script, the directory cannot be used, or another run cannot have a view of the working
            directory. The directory is gone then, unless something else lies in it.
    """
    private = folder.private
    is_moved = private != folder.directory
    guarding = Guardian(private, folder.directory, merge=folder.merge) if is_moved else Guardian()
    with guarding as guardian, arriving(folder), outliving():
        view = _view() if plan.runs_again and not in_place else None

        def launch(label: str, request: Request) -> "Run":
            if label == "before":
                first = run_script(request, private / label, live=True, meanwhile=_import_the_rest, guardian=guardian)
                if _was_interrupted(first):
                    raise KeyboardInterrupt
                private.mkdir(exist_ok=True)  # the program may have deleted it
                return first
            with _running_again(label, view, private) as through:
                return run_script(request, private / label, live=False, through=through, guardian=guardian)

        before = None if _is_given_a_folder(scenario) else first_run(launch, scenario, plan)

        def again(label: str, request: Request) -> "Run":
            return before if before is not None and label == "before" else launch(label, request)

        from dtypedoctor.cli.reported import reported
        from dtypedoctor.trials.treatment import treat

        treatment = treat(scenario, again, plan, loads_checkpoints=before is None)
        code = treatment.before.exit.code
        folder.reserve()
        return reported(treatment, private, shown=folder.directory), code if code >= 0 else 128 - code


def _is_given_a_folder(scenario: Scenario) -> bool:
    """Whether a folder is among the script's arguments, which may be a checkpoint that is checked before the script changes it."""
    workload = scenario.steps[0].workload
    arguments = workload.args if isinstance(workload, Script) else []
    return any(os.path.isdir(argument.partition("=")[2] or argument) for argument in arguments)


def _view() -> "View":
    """A view of the working directory as it is now, for the runs after the first.

    Raises:
        UsageError: there is no working directory, or no view of it can be made.
    """
    from dtypedoctor.runner.view import NoViewError, View

    try:
        return View(Path.cwd())
    except (NoViewError, OSError) as error:
        raise UsageError(
            f"another run needs a copy-on-write view of the working directory, which is not possible here: {error}",
            "With --rerun-in-place it runs in that directory and may change files there; without --rerun, --try, --ablate and "
            "--verify-uninstrumented there is no other run.",
        ) from error


@contextmanager
def _running_again(label: str, view: "View | None", directory: Path) -> Iterator[list[str]]:
    """Says on stderr that the script runs again, and where; what stands before its command.

    Raises:
        UsageError: the view could not be made.
    """
    from dtypedoctor.cli.live import label_in_words
    from dtypedoctor.runner.view import NoViewError

    where = "; it may change files" if view is None else " in a copy-on-write view of the working directory"
    say(f"dtypedoctor: running the script again ({label_in_words(label)}){where} …")
    if view is None:
        yield []
        return
    try:
        with view.before(directory / label) as words:
            yield words
    except NoViewError as error:
        raise UsageError(
            f"its view of the working directory could not be made: {error}", "Add --rerun-in-place."
        ) from error


def _import_the_rest() -> None:
    """Imports what reads a trace and shows a report, rules included; the second time there is nothing to do."""
    for name in ("cli.reported", "trials.treatment", "report.to_terminal"):
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


@contextmanager
def removed_if_refused(directory: Path, shown: Path | None = None) -> Iterator[None]:
    """Takes the run directory, which the user knows as ``shown``, away again where nothing could be run in it, or nothing was measured before
    Ctrl-C.
    """
    try:
        yield
    except UsageError:
        remove_unused(directory)
        raise
    except KeyboardInterrupt as error:
        if remove_unmeasured(directory):
            raise KeyboardInterrupt(
                f"interrupted before anything was measured; {shown or directory} was removed"
            ) from error
        raise


def _was_interrupted(first: "Run") -> bool:
    """Whether Ctrl-C has ended a script of which nothing was measured; one that raises KeyboardInterrupt by itself has failed."""
    return first.exit.asked_to_end == signal.SIGINT and not any(run.trace.samples for run in (first, *first.ranks))
