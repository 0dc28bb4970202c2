"""Several scenarios in one directory: one after the other here, or as jobs of an executor; the journal, by which an interrupted one goes on."""

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from dtypedoctor.cli.reported import exit_code, kept
from dtypedoctor.errors import DoctorError, UsageError
from dtypedoctor.foreign_files import append_file, parse_json, read_file, write_file
from dtypedoctor.interruptions import say
from dtypedoctor.lab.cli.matrix import (
    MATRIX_JSON,
    MatrixRow,
    in_one_line,
    matrix_exit,
    not_run_report,
    not_run_row,
    read_matrix_json,
    refused_report,
    refused_row,
    render_matrix_json,
    row_of,
)
from dtypedoctor.lab.cli.running import ProgressLines
from dtypedoctor.lab.cli.scenario_files import allow_directory
from dtypedoctor.lab.runner.executors import Ended, Job, Where, machines, run_jobs
from dtypedoctor.lab.scenarios.model import Scenario
from dtypedoctor.lab.trials.treatment import Plan
from dtypedoctor.redaction.redact import redact, without_process_secrets
from dtypedoctor.report.build import REPORT_JSON
from dtypedoctor.report.files import read_report
from dtypedoctor.report.to_json import Report
from dtypedoctor.runner.directories import clear, new_directory, remove_unmeasured
from dtypedoctor.runner.process import ending_by_interrupt
from dtypedoctor.text import counted

JOURNAL = "scenarios.jsonl"
"""What was asked for and the rows of the scenarios that are finished, in the directory of all."""
SCHEMA = 1
_RUNS = 12
"""Runs that a scenario takes at most, as far as the time limit of its job goes."""
JOBS = "jobs"
"""Folder of what jobs are given and leave; empty when all have ended."""

Done = tuple[MatrixRow, Report]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Scenarios to treat in one directory.

    Attributes:
        directory: holds a folder for each.
        remedies: whether fixes are tried.
        wheels: folder of unpacked releases.
        resumed: whether the directory is that of an earlier command.
        finished: rows from before an interruption, by scenario.
    """

    directory: Path
    scenarios: tuple[Scenario, ...]
    remedies: bool
    wheels: Path | None
    resumed: bool = False
    finished: Mapping[str, MatrixRow] = field(default_factory=dict)


def new_batch(out: Path | None, scenarios: Sequence[Scenario], *, remedies: bool, wheels: Path | None) -> Batch:
    """A batch in a new directory.

    Raises:
        UsageError: the directory cannot be made.
    """
    directory = new_directory(out, "scenarios")
    batch = Batch(directory=directory, scenarios=tuple(scenarios), remedies=remedies, wheels=wheels)
    asked = {
        "schema": SCHEMA,
        "scenarios": [one.model_dump(mode="json", exclude_defaults=True) for one in scenarios],
        "remedies": remedies,
        "wheels": str(wheels.resolve()) if wheels is not None else None,
    }
    _append(batch, asked)
    return batch


def resumed_batch(directory: Path, *, allow_code: bool) -> Batch:
    """The batch whose directory this is.

    Raises:
        UsageError: there is none, it cannot be read, or it is from elsewhere and may not run code.
    """
    path = directory / JOURNAL
    try:
        first, *rest = read_file(path).split(b"\n")
        asked = parse_json(first)
        if asked["schema"] > SCHEMA:
            raise UsageError(f"{path}: written by a newer version", "Update dtypedoctor to resume it.")
        scenarios = {one.name: one for one in map(Scenario.model_validate, asked["scenarios"])}
        if not scenarios:
            raise ValueError("it names no scenarios")
        rows = [row for row in _readable(rest) if row.scenario in scenarios]
        batch = Batch(
            directory=directory,
            scenarios=tuple(scenarios.values()),
            remedies=bool(asked["remedies"]),
            wheels=Path(asked["wheels"]) if asked["wheels"] else None,
            resumed=True,
            finished={row.scenario: row for row in rows if (directory / row.scenario / REPORT_JSON).is_file()},
        )
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise UsageError(
            f"{directory}: no scenarios to resume here",
            "Pass --resume the directory of an interrupted `dtypedoctor run`.",
        ) from error
    allow_directory(directory, allowed=allow_code)
    return batch


def _readable(lines: Sequence[bytes]) -> Iterator[MatrixRow]:
    """The rows of the journal; one that a full disk or a kill has torn is left out, so its scenario runs again."""
    for line in lines:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            yield TypeAdapter(MatrixRow).validate_python(parse_json(line))


def _append(batch: Batch, values: Mapping[str, object]) -> None:
    line = json.dumps(values, separators=(",", ":"), allow_nan=False).encode("ascii") + b"\n"
    with contextlib.suppress(OSError), append_file(batch.directory / JOURNAL) as file:
        if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
            line = b"\n" + line
        file.write(line)


def treat_all(batch: Batch, where: Where) -> tuple[list[MatrixRow], list[Report]]:
    """Treats each scenario in a folder of its name, and leaves the matrix beside them.

    A scenario that cannot be run at all is a row of the matrix like any other; the rest is run all the same. After Ctrl-C, those that
    have not come to their end are rows too, and count neither as expected nor as unexpected.

    Returns:
        The rows, and the reports in the same order.

    Raises:
        UsageError: the executor cannot be used, or something must not be sent to it.
    """
    done = dict(_finished(batch))
    waiting = [one for one in batch.scenarios if one.name not in done]
    total = len(batch.scenarios)
    view = ProgressLines(sys.stderr, every_run=False)
    view.say(f"Plan: {len(waiting)} of {counted(total, 'scenario')}")
    try:
        with ending_by_interrupt():
            for row, report in (
                _one_by_one(batch, waiting, view) if where.one_by_one else _as_jobs(batch, waiting, where, view)
            ):
                done[row.scenario] = row, report
                view.say(f"{len(done)}/{total} {in_one_line(row)}")
                if row.report is not None:
                    _append(batch, asdict(row))
    except KeyboardInterrupt:
        if where.one_by_one and not done and remove_unmeasured(batch.directory):
            raise
        view.say(f"Interrupted: {len(done)} of {total} scenarios are finished.")
    left = [one.name for one in waiting if one.name not in done]
    done |= {name: (not_run_row(name), not_run_report(name)) for name in left}
    rows, reports = map(list, zip(*(done[one.name] for one in batch.scenarios), strict=True))
    try:
        write_file(batch.directory / MATRIX_JSON, render_matrix_json(rows, exit_code=matrix_exit(rows)))
        say(f"Matrix: {batch.directory / MATRIX_JSON}")
    except OSError as error:  # the disk is full, or the directory is gone: it can still be shown
        say(f"dtypedoctor: cannot write the matrix to {batch.directory}: {error.strerror}")
    if left or any(row.cause.startswith(LOST) for row in rows):
        say(f"Resume with: dtypedoctor run --resume {shlex.quote(str(batch.directory))}")
    return rows, reports


def _finished(batch: Batch) -> Iterator[tuple[str, Done]]:
    """What is there from before an interruption, but for reports that cannot be read any more."""
    for name, row in batch.finished.items():
        path = batch.directory / name / REPORT_JSON
        try:
            yield name, (row, read_report(path))
        except UsageError as error:
            why = error.message.removeprefix(f"{path}: ")
            say(f"dtypedoctor: {path}: {why}; {name} runs again")


LOST = "not run: "
"""How the reason begins where a machine has not run a scenario to its end, so that running it again may help."""


def _one_by_one(batch: Batch, waiting: Sequence[Scenario], view: ProgressLines) -> Iterator[Done]:
    for scenario in waiting:
        clear(batch.directory / scenario.name)  # what an interruption has left there
        try:
            yield _treated(batch, scenario, view)
        except DoctorError as refused:
            yield _refused(scenario, refused, view)


def _treated(batch: Batch, scenario: Scenario, view: ProgressLines) -> Done:
    from dtypedoctor.lab.cli.running import treat_scenario  # a batch of jobs treats none here

    began = time.monotonic()
    report = treat_scenario(
        scenario,
        new_directory(batch.directory / scenario.name, scenario.name),
        Plan(remedies=batch.remedies),
        view,
        wheels=batch.wheels,
    )
    path, seconds = f"{scenario.name}/{REPORT_JSON}", round(time.monotonic() - began, 2)
    return row_of(redact(report), exit_code=exit_code(report), seconds=seconds, path=path), report


def _refused(scenario: Scenario, refused: DoctorError, view: ProgressLines) -> Done:
    if refused.hint:
        view.say(f"{scenario.name}: {refused.hint}")
    row = refused_row(scenario.name, refused.message, exit_code=int(refused.exit_code))
    return row, refused_report(scenario.name, refused.message)


def _as_jobs(batch: Batch, waiting: Sequence[Scenario], where: Where, view: ProgressLines) -> Iterator[Done]:
    """Each scenario as a job of its own, in the order in which they end."""
    by_name = {scenario.name: scenario for scenario in waiting}
    longest = _RUNS * max((scenario.time_limit for scenario in waiting), default=0)
    with machines(where.fitting(waiting), batch.directory / JOBS, longest) as executor:
        jobs = [_job(batch, scenario) for scenario in waiting]
        for job, ended in run_jobs(executor, jobs, view.say):
            try:
                if isinstance(ended, DoctorError):
                    raise ended
                yield _arrived(batch, job, ended)
            except DoctorError as refused:
                yield _refused(by_name[job.name], refused, view)


def _job(batch: Batch, scenario: Scenario) -> Job:
    """The command that treats one scenario, as a batch of its own in a folder of its own."""
    place = (batch.directory / JOBS / scenario.name).resolve()
    clear(place)  # what an interruption has left there
    asked = place / "scenario" / f"{scenario.name}.yaml"
    asked.parent.mkdir(parents=True)
    write_file(asked, json.dumps(scenario.model_dump(mode="json", exclude_defaults=True)))
    options = [] if batch.remedies else ["--no-remedies"]
    if batch.wheels is not None:
        options += ["--wheels", str(batch.wheels.resolve())]
    out = ["--out", str(place / "run"), "--allow-code", "--format", "json"]
    return Job(
        name=scenario.name,
        command=["-P", "-m", "dtypedoctor", "run", str(asked.parent), *out, *options],
        log=place / "log.txt",
        limit=float(_RUNS * scenario.time_limit),
        folder=Path.cwd(),
    )


def _arrived(batch: Batch, job: Job, ended: Ended) -> Done:
    """The row and the report of a scenario that another process has treated, whose files lie in the directory then.

    Raises:
        DoctorError: dtypedoctor itself has failed there, or was stopped.
    """
    run, place = job.log.parent / "run", batch.directory / job.name
    if ended.timed_out:
        raise UsageError(f"not run: stopped after {ended.seconds:.0f} s", "Raise its time_limit.")
    try:
        rows = read_matrix_json(read_file(run / MATRIX_JSON).decode("utf-8"))
        row = next(row for row in rows if row.scenario == job.name)
    except (OSError, StopIteration, UnicodeDecodeError, UsageError) as error:
        raise DoctorError(
            f"not run: dtypedoctor failed there: {_last_line(job.log)}", f"All that it printed: {job.log}"
        ) from error
    if row.report is None:
        return row, refused_report(job.name, row.cause)
    clear(place)
    try:
        (run / job.name).rename(place)
    except OSError as error:
        raise UsageError(f"{place}: cannot be written ({error.strerror})", "Free some space.") from error
    clear(job.log.parent)
    report = replace(
        read_report(place),
        command=shlex.join(without_process_secrets(["dtypedoctor", *sys.argv[1:]])),
        next_command=f"dtypedoctor report {shlex.quote(str(place))} --format md",
    )
    return row, kept(place, report)


def _last_line(log: Path) -> str:
    try:
        return read_file(log).decode("utf-8", "replace").strip().rpartition("\n")[2]
    except OSError:
        return "it has printed nothing"
