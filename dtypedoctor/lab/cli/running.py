"""What ``run`` does once its arguments are read. It is imported only then: ``--help`` must not wait for it.

Of several scenarios each gets a directory of its own, and all of them one matrix: ``many.py``.
"""

import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of
from pathlib import Path
from typing import TextIO

from dtypedoctor.analysis import ending_of
from dtypedoctor.cli.reported import reported
from dtypedoctor.errors import UsageError
from dtypedoctor.lab.bisect.bisect import bisect_inside
from dtypedoctor.lab.bisect.questions import Measured
from dtypedoctor.lab.bisect.symptoms import part_in_words
from dtypedoctor.lab.cli.scenario_files import load_checked, require_at_hand
from dtypedoctor.lab.runner.launch import PRELOAD, WORKER, Launcher, Resident, run_script_of
from dtypedoctor.lab.scenarios.loading import resolve, shipped_beside
from dtypedoctor.lab.scenarios.model import Request, Scenario, Script
from dtypedoctor.lab.trials.changes import is_capsule
from dtypedoctor.lab.trials.treatment import Plan, treat
from dtypedoctor.report.to_json import Report
from dtypedoctor.runner.directories import clear, removed_if_refused
from dtypedoctor.runner.process import (
    ending_by_interrupt,
    unless_interrupted,
)
from dtypedoctor.runner.run import Run
from dtypedoctor.text import counted, duration, number, one_line

IMPORTS = "imports"
"""The part of a run before its first one, in which torch is imported; it has no directory."""

_LABELS = {
    IMPORTS: "importing torch and the trainers",
    "before": "baseline",
    "unwatched": "uninstrumented",
    "reference": "reference run",
    "float32-twin": "float32 reference",
}
"""What a run is called while it goes on, by the name of its directory."""

_MOST_NAMED = 2


def label_in_words(label: str) -> str:
    """Return what a person would call a run whose directory is called ``label``."""
    return _LABELS.get(label) or label.replace("remedy-", "fix: ").replace("edit-", "edit on trial, run ").replace(
        "inside-", "parts in float32, run "
    )


class ProgressLines:
    """Prints progress on ``stream``, usually ``sys.stderr``, a line for each run that begins or ends.

    Args:
        stream: where.
        every_run: False leaves no line for the single runs, whose number may be in the hundreds.
    """

    def __init__(self, stream: TextIO, *, every_run: bool = True) -> None:
        self._stream = stream
        self._every_run = every_run
        self._label = ""
        self._began = time.monotonic()

    def say(self, line: str) -> None:
        """Prints a line."""
        print(one_line(line, 2000) if line.strip() else line, file=self._stream, flush=True)

    def begin(self, label: str) -> None:
        """A run starts, or another part; ``label`` is the name of its directory, or words."""
        self._label, self._began = label_in_words(label), time.monotonic()
        if self._every_run:
            self.say(f"{one_line(self._label, 500)} …")

    def end(self, outcome: str) -> None:
        """The run has ended as ``outcome`` says."""
        if self._every_run:
            self.say(f"{self._label:<36} {time.monotonic() - self._began:5.1f} s  {outcome}")

    def probe(self, measured: Measured) -> None:
        """A probe of a bisection has ended."""
        symptom, again = measured.symptom, " (known)" if measured.repeated else ""
        what, peak = _treated(measured.names), f"peak {number(symptom.absmax)}"
        self.say(f"  {measured.probe.outcome:<10} {what:<46} {peak:<14} {duration(symptom.seconds):>7}{again}")


def _treated(names: Sequence[str]) -> str:
    if not names:
        return "no module in float32"
    if names[0] == "":
        return "the whole model"
    shown = ", ".join(one_line(part_in_words(name), 40) for name in names[:_MOST_NAMED])
    return shown + (f" and {counted(len(names) - _MOST_NAMED, 'module')} more" if len(names) > _MOST_NAMED else "")


def treat_scenario(
    scenario: Scenario,
    directory: Path,
    plan: Plan,
    view: ProgressLines | None = None,
    preload: Sequence[str] | None = None,
    wheels: Path | None = None,
) -> Report:
    """Treats a scenario in ``directory``, which is new, and leaves its report there.

    Progress goes to ``view``, which shows it on stderr if left out. ``preload`` names the modules that its workers are forked with, beside
    those that every worker needs; if left out, all that a scenario may need. What the scenario requires is taken from ``wheels``, if given.

    Raises:
        UsageError: the scenario cannot be run, or the directory cannot be used. It is gone then, unless something else lies in it.
    """
    in_matrix = view is not None
    view = view or ProgressLines(sys.stderr)
    with removed_if_refused(directory):
        require_at_hand(scenario)
    with (
        nullcontext() if in_matrix else ending_by_interrupt(),  # who treats several has said so once for all
        removed_if_refused(directory),
        _with_releases(scenario, wheels),
        _runner(scenario, directory, view, preload) as run,
    ):

        def launch(label: str, request: Request) -> Run:
            view.begin(label)
            finished = run(request, directory / label)
            view.end(ending_of(finished).words)
            return finished

        search = bisect_inside if is_capsule(scenario) else None
        return reported(treat(scenario, launch, plan, search), directory)


@contextmanager
def _with_releases(scenario: Scenario, wheels: Path | None) -> Iterator[None]:
    """Lets the processes of a scenario import the releases that it requires, from ``wheels`` or from where they are installed.

    Raises:
        UsageError: a release is not there.
    """
    folders: list[str] = []
    for wanted in scenario.requires:
        name, _, version = wanted.partition("==")
        if not version or "/" in wanted:
            raise UsageError(f"{scenario.name}: requires: {wanted!r} is no release", "Write NAME==VERSION.")
        folder = (wheels or Path("wheels")) / f"{name}-{version}"
        if wheels is not None and folder.is_dir():
            folders.append(str(folder.resolve()))
        elif _installed(name) != version:
            where = f"neither installed nor in {wheels}" if wheels is not None else "not installed"
            given = "" if wheels is not None else f"  # then pass --wheels {folder.parent}"
            raise UsageError(
                f"{scenario.name} requires {wanted}, which is {where}",
                f"pip install --no-deps --target {shlex.quote(str(folder))} {wanted}{given}",
            )
    before = os.environ.get("PYTHONPATH")
    if folders:
        os.environ["PYTHONPATH"] = os.pathsep.join([*folders, *([before] if before else [])])
    try:
        yield
    finally:
        if folders and before is None:
            del os.environ["PYTHONPATH"]
        elif folders:
            os.environ["PYTHONPATH"] = str(before)


def _installed(name: str) -> str | None:
    """The version of an installed distribution, without importing it; None where it is not there."""
    try:
        return version_of(name)
    except PackageNotFoundError:
        return None


@contextmanager
def _runner(
    scenario: Scenario, directory: Path, view: ProgressLines, preload: Sequence[str] | None
) -> Iterator[Callable[[Request, Path], Run]]:
    """What makes the runs of a scenario: a fresh interpreter for a script, else workers, one of which keeps the model loaded."""
    workload = scenario.steps[0].workload
    if isinstance(workload, Script):
        yield lambda request, place: unless_interrupted(run_script_of(request, place, live=False))
        return
    imported = (PRELOAD,) if preload is None else (WORKER, *preload)
    with Launcher(directory / "server.log", preload=imported) as launcher:
        if launcher.is_importing:
            view.begin(IMPORTS)
            launcher.wait_for_imports()
            view.end("")
        with Resident(launcher, scenario, directory / "server", view.say) as resident:
            yield _Once(resident.run).run


class _Once:
    """Makes each run once: a scenario that dtypedoctor runs itself is seeded, so a fix that is the healthy reference, say, is the same run."""

    def __init__(self, run: Callable[[Request, Path], Run]) -> None:
        self._run = run
        self._made: list[tuple[Request, Run]] = []

    def run(self, request: Request, place: Path) -> Run:
        """The run of ``request`` in ``place``: one that came to its own end is copied there."""
        earlier = next((run for made, run in self._made if made == request), None)
        if earlier is not None and not place.exists():
            try:
                shutil.copytree(earlier.directory, place, symlinks=True)
                return replace(earlier, directory=place)
            except OSError:  # no room for a copy
                clear(place)
        made = self._run(request, place)
        if not made.died and not made.exit.asked_to_end:
            self._made.append((request, made))
        return made


def load_all(texts: Sequence[str], *, allow_code: bool) -> list[Scenario]:
    """The scenarios that a person names, in that order; those of a folder by name, each file once.

    Raises:
        UsageError: something cannot be read, a folder holds none, two files have the same name, or a scenario from elsewhere
            names code and ``allow_code`` is not set.
    """
    paths = {path.resolve(): path for text in texts for path in _paths(text)}
    loaded = [load_checked(path, allow_code=allow_code) for path in paths.values()]
    twice = [name for name, times in Counter(scenario.name for scenario in loaded).items() if times > 1]
    if twice:
        raise UsageError(
            f"{', '.join(twice)}: two files of this name", "Rename one: each scenario gets a directory of its name."
        )
    return loaded


def _paths(text: str) -> list[Path]:
    folder = Path(text)
    if not folder.exists():
        folder = shipped_beside(text) or folder
    if not folder.is_dir():
        return [resolve(str(folder))]
    found = sorted(folder.glob("*.yaml"))
    if not found:
        raise UsageError(f"{text}: no scenarios here", "A scenario is a file that ends in .yaml.")
    return found
