"""What ``exec`` does where a script may be run more than once: with fixes, with ablations, without instrumentation."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dtypedoctor.cli.scripts import edited_runs, finished, first_run, guarded
from dtypedoctor.errors import UsageError
from dtypedoctor.interruptions import say
from dtypedoctor.lab.cli.live import label_in_words
from dtypedoctor.lab.runner.launch import asked_of, run_script_of
from dtypedoctor.lab.scenarios.model import Request, Scenario
from dtypedoctor.lab.scenarios.reading import dotted, in_words
from dtypedoctor.lab.trials.treatment import Plan, treat
from dtypedoctor.report.to_json import Report
from dtypedoctor.runner.command import Program
from dtypedoctor.runner.directories import RecordFolder
from dtypedoctor.runner.run import Run
from dtypedoctor.runner.view import NoViewError, View


def treat_script(
    program: Program, folder: RecordFolder, asked: Mapping[str, Any], *, in_place: bool = False
) -> tuple[Report, int]:
    """Treats a user's script; the script has this process's streams the first time it runs.

    Args:
        program: what to run.
        folder: see :func:`dtypedoctor.cli.scripts.record_script`.
        asked: fields of a :class:`Plan`.
        in_place: whether another run may change files of the working directory; else it gets a copy-on-write view of it.

    Raises:
        UsageError: see there, or another run cannot have a view of the working directory.
    """
    plan = Plan(only=frozenset(program.fixes), **asked)
    with guarded(folder) as guardian:
        try:
            scenario = Scenario.model_validate(program.described())
        except ValidationError as error:
            mistakes = (f"{dotted(one['loc'])}: {in_words(one)}" for one in error.errors())
            raise UsageError("; ".join(mistakes)) from error
        view = _view() if not in_place else None

        def launch(label: str, request: Request) -> Run:
            if label == "before":
                return first_run(program, asked_of(request), folder, guardian)
            with _running_again(label, view, folder.private) as through:
                return run_script_of(request, folder.private / label, live=False, through=through, guardian=guardian)

        return finished(treat(scenario, launch, plan, attempt=edited_runs(program, folder, guardian)), folder)


def _view() -> View:
    """A view of the working directory as it is now, for the runs after the first.

    Raises:
        UsageError: there is no working directory, or no view of it can be made.
    """
    try:
        return View(Path.cwd())
    except (NoViewError, OSError) as error:
        raise UsageError(
            f"another run needs a copy-on-write view of the working directory, which is not possible here: {error}",
            "With --rerun-in-place it runs in that directory and may change files there; without --rerun, --try, --ablate and "
            "--verify-uninstrumented there is no other run.",
        ) from error


@contextmanager
def _running_again(label: str, view: View | None, directory: Path) -> Iterator[list[str]]:
    """Says on stderr that the script runs again, and where; what stands before its command.

    Raises:
        UsageError: the view could not be made.
    """
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
