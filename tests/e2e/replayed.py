"""Runs a script with standbys as often as they can be made, and replays parts of it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from exec_corpus import serve
from forked_script import redirect
from nursery import fork

from dtypedoctor.runner.run import STDOUT, Run, WorkerExit, collect
from dtypedoctor.scenario.model import REQUEST, Request, Scenario, ScenarioStep, Script, Window
from dtypedoctor.trials.replays import Replays


def scenario_of(path: Path) -> Scenario:
    """The scenario that ``exec`` makes of a script."""
    return Scenario(
        name=path.stem,
        summary=path.stem,
        deterministic=False,
        steps=[ScenarioStep(workload=Script(kind="script", path=str(path)))],
    )


def run_standing_by(path: Path, folder: Path, label: str = "before", *, watch: bool = True) -> Run:
    """Runs a script in ``folder``, with a standby before every outermost call; with ``watch`` off as it would run alone."""
    directory, work = folder / label, folder / "work"
    directory.mkdir(parents=True)
    work.mkdir()
    request = Request(scenario=scenario_of(path), standby=watch, watch=watch, witness=True)
    (directory / REQUEST).write_text(request.model_dump_json(), encoding="utf-8")
    began = time.monotonic()
    code = fork(_live, directory, work).wait()
    return collect(directory, WorkerExit(code=code, timed_out=False, seconds=time.monotonic() - began), foreign=True)


def _live(directory: Path, work: Path) -> int:
    from dtypedoctor.worker import standbys

    standbys.FREE_SECONDS = 1e9
    standbys.MOST_READ = -1  # they stay, also where nothing fails
    redirect(directory / STDOUT)
    os.chdir(work)
    return serve(directory)


def replay(run: Run, label: str, windows: Sequence[Window]) -> tuple[Run | None, Replays]:
    """A replay of ``run`` with the op trace on in ``windows``."""
    replays = Replays(run)
    return replays(label, Request(scenario=scenario_of(run.directory), windows=list(windows))), replays


def files_in(folder: Path) -> dict[str, bytes]:
    """What lies below a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
