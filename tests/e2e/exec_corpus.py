"""Runs the scripts of the corpus as `dtypedoctor exec` does, each in a fork of one process, and compares with the headers.

As a program it prints a table: ``python tests/e2e/exec_corpus.py [family or script name ...]``.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from forked_script import redirect
from nursery import fork, preload
from script_corpus import Case, cases, matches_fqn
from snapshot import Entry, entry

from dtypedoctor.cli.reported import exit_code
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.examination.results import Treatment
from dtypedoctor.instrument.instruments import HOW_TO_REPLAY
from dtypedoctor.lab.runner.launch import asked_of
from dtypedoctor.lab.scenarios.model import Request, Scenario, ScenarioStep, Script
from dtypedoctor.lab.trials.treatment import Plan, treat
from dtypedoctor.redaction.redact import REQUEST
from dtypedoctor.report.build import build_report
from dtypedoctor.report.to_json import Report, Status, render_json
from dtypedoctor.runner import view
from dtypedoctor.runner.process import prepare
from dtypedoctor.runner.run import Run, WorkerExit, collect
from dtypedoctor.trace.ranks import STATES


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosed:
    """A script after its treatment.

    Attributes:
        wrong: each thing that is not as the header says.
        found: the findings in a line, the first with its place.
        entry: the findings as the snapshot keeps them.
    """

    case: Case
    wrong: tuple[str, ...]
    found: str
    entry: Entry
    seconds: float


def found_line(treatment: Treatment) -> str:
    findings = treatment.findings
    if not findings:
        return f"nothing ({treatment.before_summary.ended})"
    first, rest = findings[0], ", ".join(f"{f.id}/{f.severity.value}" for f in findings[1:])
    return f"{place(first)} {first.confidence.value}" + (f"; then {rest}" if rest else "")


def place(finding: Finding) -> str:
    return f"{finding.id} fqn={finding.fqn!r} op={finding.op} {finding.phase} step={finding.step}"


def diagnose_case(case: Case, folder: Path) -> Diagnosed:
    """Treats a script in ``folder``, whose child ``work`` is its working directory."""
    began = time.monotonic()
    treatment = treat_forked(case.path, folder, Plan(certify=False, only=frozenset()))
    seconds = time.monotonic() - began
    report = build_report(treatment, command="", files={}, next_command="")
    return Diagnosed(
        case=case,
        wrong=tuple(mistakes(case, treatment, report)),
        found=found_line(treatment),
        entry=entry(json.loads(render_json(report)), exit_code(report)),
        seconds=seconds,
    )


def treat_forked(
    path: Path, folder: Path, plan: Plan, remedies: Sequence[str] = (), *, tries_edits: bool = False
) -> Treatment:
    """Treats a script in ``folder`` and asks for ``remedies``; each run is a fork."""
    work = folder / "work"
    work.mkdir()

    def launch(label: str, request: Request) -> Run:
        return run_forked(request, folder / label, work)

    def attempt(label: str, edited: Mapping[str, str], seconds: int) -> Run:
        request = Request(scenario=scenario_of(path), replay=True, repeats="before", repeatable=True)
        return run_forked(request, folder / label, work, edited=edited)

    return treat(scenario_of(path, remedies), launch, plan, attempt=attempt if tries_edits else None)


def scenario_of(path: Path, remedies: Sequence[str] = ()) -> Scenario:
    return Scenario(
        name=path.stem,
        summary=path.stem,
        deterministic=False,
        remedies=list(remedies),
        steps=[ScenarioStep(workload=Script(kind="script", path=str(path)))],
    )


def run_alone(path: Path, folder: Path, *, replay: str = "") -> Run:
    """Runs a script in a folder that does not exist yet, whose child ``work`` is its working directory: as it would run alone, or with
    ``replay`` watched, as ``DTYPEDOCTOR_REPLAY_IN_PLACE`` says it."""
    (folder / "work").mkdir(parents=True)
    request = Request(scenario=scenario_of(path), watch=bool(replay), replay=bool(replay), witness=True)
    return run_forked(request, folder / "run", folder / "work", replay)


def files_in(folder: Path) -> dict[str, bytes]:
    """What lies below a folder, by name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def run_forked(
    request: Request, directory: Path, work: Path, replay: str = "", edited: Mapping[str, str] | None = None
) -> Run:
    """The request in a child that has the heavy libraries imported; a file that is edited on trial has its other text in this child alone."""
    prepare(asked_of(request), directory)
    began = time.monotonic()
    code = fork(live, directory, work, replay, edited).wait()
    ended = WorkerExit(code=code, timed_out=False, seconds=time.monotonic() - began)
    return collect(directory, ended, foreign=True)


def live(directory: Path, work: Path, replay: str = "", edited: Mapping[str, str] | None = None) -> int:
    """The child's side: its streams and its working directory, then the request."""
    redirect(directory / "output.txt")
    os.chdir(work)
    if edited:
        view._enter(str(work), tempfile.mkdtemp(), str(directory), _copied(edited))
    os.environ[HOW_TO_REPLAY] = replay
    return serve(directory)


def _copied(edited: Mapping[str, str]) -> dict[str, str]:
    """A file for each text, by the path of the file that it is to cover."""
    folder = Path(tempfile.mkdtemp())
    copies = {path: folder / str(number) for number, path in enumerate(edited)}
    for path, text in edited.items():
        copies[path].write_text(text, encoding="utf-8")
    return {path: str(copy) for path, copy in copies.items()}


def serve(directory: Path) -> int:
    """The child's side: what a fresh interpreter would do, as far as the trace can tell."""
    try:
        _recorded(directory)
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:  # noqa: BLE001 - whatever ends a script is shown as Python shows it
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _recorded(directory: Path) -> None:
    """The program as ``__main__``, between the beginning and the end of its recording."""
    from dtypedoctor.worker.repeating import repeat
    from dtypedoctor.worker.script import ScriptRecording

    if (directory / STATES).exists():
        repeat(str(directory), is_first=True)
    request = json.loads((directory / REQUEST).read_text(encoding="utf-8"))
    workload = request["scenario"]["steps"][0]["workload"]
    recording = ScriptRecording(request, directory)
    recording.begin()
    path = os.path.abspath(workload["path"])
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update(__builtins__=builtins, __file__=path, __spec__=None, __annotations__={})
    sys.argv, sys.path[:0] = [workload["path"], *workload["args"]], [os.path.dirname(os.path.realpath(path))]
    ended_by: BaseException | None = None
    try:
        exec(compile(Path(path).read_bytes(), path, "exec", dont_inherit=True), vars(main))  # noqa: S102
    except BaseException as error:
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ is not None else None
        ended_by = error
        raise
    finally:
        recording.end(ended_by)


def mistakes(case: Case, treatment: Treatment, report: Report) -> Iterator[str]:
    """What is not as the header says; in a healthy script findings that are mere information do not count."""
    findings = [f for f in treatment.findings if f.severity is not Severity.INFO or not case.healthy]
    ended = treatment.before_summary.ended
    normally = ended == "completed" or ended.startswith("ended with status")
    if normally != (case.raises in (None, "SystemExit")) or not (normally or ended.startswith(str(case.raises))):
        yield f"ended: {ended}"
    if case.healthy:
        yield from (f"false alarm: {f.id}" for f in findings)
        if not findings and report.status is not Status.HEALTHY:
            yield f"status: {report.status}: {report.headline}"
        return
    if not findings:
        yield "nothing found"
        return
    first = findings[0]
    if first.id not in case.ids:
        yield f"id: {first.id}"
    if not matches_fqn(first.fqn, case.fqns):
        yield f"fqn: {first.fqn!r}"
    for name, actual, accepted in (
        ("op", first.op, case.ops),
        ("phase", first.phase, case.phases),
    ):
        if accepted is not None and actual not in accepted:
            yield f"{name}: {actual}"
    if case.step is not None and first.step != case.step:
        yield f"step: {first.step}"


def expected(case: Case) -> str:
    """What the header says, in a line."""
    fqns = "any" if case.fqns is None else "|".join(map(repr, case.fqns))
    ops = "any" if case.ops is None else "|".join(map(str, case.ops))
    phases = "any" if case.phases is None else "|".join(map(str, case.phases))
    return f"{'|'.join(case.ids) or 'nothing'} fqn={fqns} op={ops} {phases} step={case.step}"


def main(wanted: list[str]) -> int:
    """Prints the table of the wanted families and scripts, all if none is named; the number of wrong ones."""
    chosen = [case for case in cases() if not wanted or case.family in wanted or case.name in wanted]
    preload(frozenset(library for case in chosen for library in case.imports))
    wrong = 0
    for case in chosen:
        with tempfile.TemporaryDirectory() as folder:
            done = diagnose_case(case, Path(folder))
        wrong += bool(done.wrong)
        print(f"{'WRONG' if done.wrong else 'ok':<5} {case.family:<12} {case.name} ({done.seconds:.1f} s)")
        if done.wrong:
            print(f"      {'; '.join(done.wrong)}\n      wanted {expected(case)}\n      found  {done.found}")
        sys.stdout.flush()
    print(f"{len(chosen) - wrong} of {len(chosen)} as their headers say")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 100))
