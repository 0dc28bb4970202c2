"""What ``exec`` does where a script runs more than once: with fixes, with ablations, without instrumentation, and with ``--fix``.

``--fix`` edits a copy of a program until it runs without a finding, one finding after the other.

Each candidate edit of the first finding is written into the copy, and the program runs again. One is kept if that failure is gone and the program comes
at least as far as before; what it meets then is the next finding. So two mistakes in a row are mended, of which each edit alone leaves the program failing.
"""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dtypedoctor.analysis import ending_of
from dtypedoctor.cli.scripts import edited_runs, finished, first_run, guarded
from dtypedoctor.diagnosis.rule import Advice, Edit, Finding, Severity
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.examine import (
    PARTS,
    ROUNDING,
    advised,
    changed_loss,
    edited_files,
    examine,
    findings_of,
    insane_losses,
)
from dtypedoctor.examination.processes import Leading
from dtypedoctor.foreign_files import read_file, write_file
from dtypedoctor.interruptions import say
from dtypedoctor.lab.cli.running import label_in_words
from dtypedoctor.lab.runner.launch import asked_of, run_script_of
from dtypedoctor.lab.scenarios.loading import dotted, in_words
from dtypedoctor.lab.scenarios.model import Request, Scenario
from dtypedoctor.lab.trials.treatment import Plan, treat
from dtypedoctor.report.build import patch_of
from dtypedoctor.report.to_json import Report
from dtypedoctor.runner.command import Program
from dtypedoctor.runner.directories import RecordFolder, runs_folder
from dtypedoctor.runner.process import run_script
from dtypedoctor.runner.run import Run
from dtypedoctor.runner.view import NoViewError, View
from dtypedoctor.text import counted

ROUNDS, WAYS = 5, 4
"""Findings that are mended one after the other, and edits that are tried for one, at most."""
MOST_BYTES, MOST_FILES = 2 << 30, 50_000
"""Of a tree that is copied."""
PATCH, STORY = "fix.patch", "fix.json"
"""In the directory of the run: all edits as one diff, and what was tried for which finding."""
_LARGEST_FILE = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Try:
    """An edit that the program was run with.

    Attributes:
        finding: id of what it is to mend.
        where: lines that it changes.
        objection: why it was taken back; empty where it was kept.
        then: the first finding of the run with it; empty where there is none.
        steps: that this run has done.
        loss: its last one, if it has any.
    """

    finding: str
    where: tuple[str, ...]
    objection: str
    then: str
    steps: int
    loss: float | None


@dataclass(slots=True, kw_only=True)
class Fixed:
    """What became of a program.

    Attributes:
        before: its first run.
        after: the run with all edits that were kept.
        tries: all runs between them, in order.
        patch: the edits that were kept as one diff, for ``patch -p0``.
        healthy: whether the last run has no finding and ends as it should.
        why_not: why it went no further, where it is not.
    """

    before: Run
    after: Run
    tries: list[Try] = field(default_factory=list)
    patch: str = ""
    healthy: bool = False
    why_not: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Where a program is edited: a copy of its files, or these themselves.

    Attributes:
        program: as it is started there.
        root: the folder below which files may be edited.
        texts: of each edited file its text before, by path.
    """

    program: Program
    root: Path
    texts: dict[str, str] = field(default_factory=dict)

    def write(self, files: dict[str, str]) -> dict[str, str]:
        """Writes texts into files; returns what was in them.

        Raises:
            ValueError: one lies elsewhere.
            OSError: one cannot be read or written.
        """
        if outside := [path for path in files if not Path(path).is_relative_to(self.root)]:
            raise ValueError(f"{outside[0]} lies outside of {self.root}")
        was = {path: read_file(Path(path), _LARGEST_FILE).decode() for path in files}
        for path, text in was.items():
            self.texts.setdefault(path, text)
        for path, text in files.items():
            Path(path).write_text(text, encoding="utf-8")
        return was

    def edits(self) -> tuple[Edit, ...]:
        """All that has changed, line by line, with paths from the working directory; a line that was added comes with one beside it."""
        edits: list[Edit] = []
        for path, text in self.texts.items():
            old, new = text.splitlines(), Path(path).read_text(encoding="utf-8").splitlines()
            for tag, begin, end, first, last in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
                added = new[first:last]
                if tag == "insert":
                    is_last = begin == len(old)
                    begin, end = begin - is_last, begin - is_last + 1
                    added = [old[begin], *added] if is_last else [*added, old[begin]]
                texts = ["\n".join(added), *[""] * (end - begin - 1)]
                for line, text_there in enumerate(texts if tag != "equal" else (), begin + 1):
                    edits.append(Edit(file=os.path.relpath(path), line=line, old=old[line - 1], new=text_there))
        return tuple(edits)


def fix_script(
    program: Program, folder: RecordFolder, *, in_place: bool, capsule_limit: int
) -> tuple[Report, int, Fixed]:
    """Runs a program, mends what is found, and so on until nothing is found or no edit helps.

    Args:
        program: what to run.
        folder: see :func:`dtypedoctor.cli.scripts.record_script`; it holds each run, the patch and what was tried.
        in_place: whether the files themselves are edited, which are to be a clean work tree of git, and not a copy.
        capsule_limit: bytes that the capsule of the failing call may take.

    Returns:
        The report on the first run, the program's own exit status in it, and what became of it.

    Raises:
        UsageError: there is no such script, the tree is too large to copy, or it is not clean.
    """
    with guarded(folder) as guardian, _work_tree(program) if in_place else _copy_of(program) as tree:
        request = tree.program.request(capsule_limit)
        lead = Leading()
        first = lead(first_run(tree.program, request, folder, guardian))

        def run(label: str) -> Run:
            say(f"dtypedoctor: running the script again ({label}) …")
            again = run_script(
                tree.program.words,
                {**request, "capsule_limit": None},
                folder.private / label,
                live=False,
                time_limit=tree.program.time_limit,
                guardian=guardian,
            )
            return lead(again)

        fixed, advice = _fixed(tree, first, run)
        treatment = examine(tree.program.described(), first, capsule_limit=capsule_limit, rerun="--rerun")
        edits = tree.edits()
        fixed.patch = patch_of(edits)
        if fixed.tries:  # with all edits, which are one patch: the first one alone is not what was kept
            words = advice.text if advice else f"`dtypedoctor explain {treatment.findings[0].id}` names other ways."
            first_advice = replace(advice or treatment.advice[0], text=f"{_outcome(fixed)} {words}", edits=edits)
            treatment = replace(treatment, advice=(first_advice, *treatment.advice[1:]), rerun="")
        write_file(folder.private / PATCH, fixed.patch)
        write_file(folder.private / STORY, json.dumps(_story(fixed), indent=1))
        report, status = finished(treatment, folder, patch=PATCH if fixed.patch else "", applied=in_place)
        return report, status, fixed


def _fixed(tree: Tree, first: Run, run: Callable[[str], Run]) -> tuple[Fixed, Advice | None]:
    """Mends one finding after the other; the advice on the first with the edits that were kept for it, if any were."""
    fixed, shown = Fixed(before=first, after=first), None
    seen: set[tuple[str, str | None]] = set()

    def again(label: str) -> Run:
        return _uninterrupted(run(label))

    try:
        while (finding := _worst(_uninterrupted(fixed.after))) is not None:
            if len(seen) == ROUNDS:
                fixed.why_not = f"{ROUNDS} findings were mended, and there are more"
                return fixed, shown
            seen.add((finding.id, finding.source))
            mended = _mended(tree, fixed, finding, seen, again)
            if mended is None:
                fixed.why_not = f"no edit was found that helps against {finding.id} ({finding.source or 'no line'})"
                return fixed, shown
            shown = shown or mended
        if ending_of(fixed.after).completed:
            _drop_needless(tree, fixed, again)
    except InterruptedRunError:
        fixed.why_not = "a run was interrupted"
        return fixed, shown
    fixed.healthy = ending_of(fixed.after).completed
    fixed.why_not = "" if fixed.healthy else ending_of(fixed.after).words
    return fixed, shown


def _drop_needless(tree: Tree, fixed: Fixed, run: Callable[[str], Run]) -> None:
    """Takes back each edited line without which the program is healthy, too, and trains as with it: what was mended last may have been why the first failed."""
    lines = tree.edits()
    dropped: set[str] = set()
    for number, line in enumerate(lines if 1 < len(lines) <= PARTS else (), 1):
        rest = [other for other in tree.edits() if other != line]
        with_all = tree.write(dict(tree.texts))
        is_healthy = False
        try:
            tree.write(edited_files(rest))
            after = run(f"without-{number}")
            is_healthy = _worst(after) is None and ending_of(after).completed and _trains_as(fixed.after, after)
        finally:
            if not is_healthy:
                tree.write(with_all)
        if is_healthy:
            fixed.after = after
            dropped.add(f"{line.file}:{line.line}")
    for at, one in enumerate(fixed.tries):
        if not one.objection and dropped.issuperset(one.where):
            fixed.tries[at] = replace(one, objection="the program is healthy without it")


def _trains_as(before: Run, after: Run) -> bool:
    """Whether two runs have the same losses but for the rounding of half precision."""
    was, losses = before.trace.losses, after.trace.losses
    return was.keys() == losses.keys() and all(
        math.isclose(was[step], losses[step], rel_tol=ROUNDING, abs_tol=ROUNDING) for step in was
    )


class InterruptedRunError(Exception):
    """A run was ended by a signal that this command got as well, or was meant to pass on."""


def _uninterrupted(run: Run) -> Run:
    """The run.

    Raises:
        InterruptedRunError: it was asked to end: nothing else is tried then.
    """
    if run.exit.asked_to_end:
        raise InterruptedRunError
    return run


def _mended(
    tree: Tree, fixed: Fixed, finding: Finding, seen: set[tuple[str, str | None]], run: Callable[[str], Run]
) -> Advice | None:
    """Tries the edits for a finding until one helps, which stays in the tree; None where none does."""
    before = fixed.after
    (first, *_), _ = advised((finding,), before, tree.program.path)
    for way in [way for way in (first, *first.others) if way.edits][:WAYS]:
        try:
            was = tree.write(edited_files(way.edits))
        except (OSError, ValueError):  # not as it was any more, or not of this tree
            continue
        number, kept = len(fixed.tries) + 1, False
        try:
            after = run(f"fix-{number}")
            objection = _objection(finding, before, after, seen)
            kept = not objection
        finally:
            if not kept:
                tree.write(was)
        if kept and (changed := changed_loss(finding, before, after)):
            # Where nothing seeds the random numbers, the loss differs from run to run, and no edit has changed it
            edited = tree.write(was)
            kept = bool(changed_loss(finding, before, run(f"as-it-is-{number}")))
            objection = "" if kept else changed
            if kept:
                tree.write(edited)
        fixed.tries.append(_try(finding, way.edits, objection, after))
        if kept:
            fixed.after = after
            return replace(way, tried="run", others=())
    return None


def _objection(finding: Finding, before: Run, after: Run, seen: set[tuple[str, str | None]]) -> str:
    """Why an edit does not help; empty where it does. That the program meets something else further on is no objection."""
    steps = counted(after.trace.steps_done, "step")
    if after.trace.steps_done < before.trace.steps_done:
        return f"the program ends after {steps}"
    following = _worst(after)
    if following is not None and (following.id, following.source) in seen:
        return f"{following.id} recurs at {following.source or 'the same place'}"
    ending = ending_of(after)
    if following is None and not ending.completed:
        return ending.words
    return next(insane_losses(finding, before, after), "") if following is None else ""


def _worst(run: Run) -> Finding | None:
    """The first finding of a run that is more than a note."""
    return next((one for one in findings_of(run) if one.severity is not Severity.INFO), None)


def _try(finding: Finding, edits: Sequence[Edit], objection: str, after: Run) -> Try:
    following, losses = _worst(after), after.trace.losses
    return Try(
        finding=finding.id,
        where=tuple(dict.fromkeys(f"{edit.file}:{edit.line}" for edit in edits)),
        objection=objection,
        then=following.id if following is not None else "",
        steps=after.trace.steps_done,
        loss=losses[max(losses)] if losses else None,
    )


def _story(fixed: Fixed) -> dict[str, object]:
    tries = [
        {
            "finding": one.finding,
            "where": list(one.where),
            "kept": not one.objection,
            "objection": one.objection or None,
            "then": one.then or None,
            "steps": one.steps,
            "loss": one.loss if one.loss is not None and math.isfinite(one.loss) else None,
        }
        for one in fixed.tries
    ]
    return {"healthy": fixed.healthy, "why_not": fixed.why_not or None, "tries": tries}


@contextmanager
def _work_tree(program: Program) -> Iterator[Tree]:
    """The files of a program themselves.

    Raises:
        UsageError: they are not in a work tree of git, or something in it is not committed.
    """
    place = program.folder or Path.cwd()
    asked = subprocess.run(
        ["git", "-C", str(place), "rev-parse", "--show-toplevel"], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        raise UsageError(f"--in-place: {place} is in no work tree of git", "Leave it out: a copy is edited then.")
    root = Path(asked.stdout.rstrip("\n"))
    changed = subprocess.run(
        ["git", "-C", str(root), "status", "--porcelain"], capture_output=True, text=True, check=False
    )
    if changed.returncode or changed.stdout:
        raise UsageError(f"--in-place: {root} has changes that are not committed", "Commit or stash them first.")
    yield Tree(program=program, root=root)


@contextmanager
def _copy_of(program: Program) -> Iterator[Tree]:
    """A copy of the folder that the program lies in, which is the working directory meanwhile if that one was inside of it.

    Raises:
        UsageError: it is too large.
    """
    here = Path.cwd()
    place = program.folder or here
    root = here if place.is_relative_to(here) else place
    _require_small(root)
    with tempfile.TemporaryDirectory(prefix="dtypedoctor-fix-", ignore_cleanup_errors=True) as scratch:
        copy = Path(scratch).resolve() / root.name
        left_out = {str(runs_folder().resolve())}
        shutil.copytree(root, copy, symlinks=True, ignore=lambda folder, names: {
            name for name in names if os.path.join(folder, name) in left_out or not _can_be_copied(folder, name)
        })  # fmt: skip

        def moved(word: str) -> str:
            path = Path(word)
            return str(copy / path.relative_to(root)) if path.is_absolute() and path.is_relative_to(root) else word

        _lead_out(copy, root)
        path = program.path and moved(program.path)
        there = replace(program, path=path, args=[*map(moved, program.args)], command=[*map(moved, program.command)])
        try:
            if here.is_relative_to(root):
                os.chdir(copy / here.relative_to(root))
            yield Tree(program=there, root=copy)
        finally:
            os.chdir(here)


def _lead_out(copy: Path, root: Path) -> None:
    """Has relative links that lead out of the copied folder lead to where they did."""
    for folder, folders, files in os.walk(copy):
        for name in (*folders, *files):
            link = Path(folder, name)
            if link.is_symlink() and not link.exists():
                original = root / link.relative_to(copy)
                if original.exists():
                    link.unlink()
                    link.symlink_to(original.resolve())


def _can_be_copied(folder: str, name: str) -> bool:
    path = os.path.join(folder, name)
    return os.path.islink(path) or os.path.isdir(path) or os.path.isfile(path)  # no pipe, no socket, no device


def _require_small(root: Path) -> None:
    """Rejects a tree that takes too long to copy."""
    files = size = 0
    for folder, _, names in os.walk(root):
        files += len(names)
        for name in names:
            size += os.lstat(os.path.join(folder, name)).st_size
        if files > MOST_FILES or size > MOST_BYTES:
            raise UsageError(
                f"--fix: {root} holds more than {MOST_FILES:,} files or {MOST_BYTES >> 30} GiB, too much to copy",
                "Start it in the folder of the program alone, or with --in-place in a clean work tree of git.",
            )


def print_fixed(fixed: Fixed) -> None:
    """Prints the patch to stdout, and the runs side by side to stderr."""
    from rich.table import Table

    from dtypedoctor.cli.output import console_for

    table = Table("run", "edited", "finding", "steps", "last loss (of backward)", box=None, pad_edge=False)
    run = fixed.before
    finding, losses = _worst(run), run.trace.losses
    first = finding.id if finding is not None else "none"
    table.add_row("as it is", "", *(first, str(run.trace.steps_done), f"{losses[max(losses)]:.4g}" if losses else ""))
    for number, one in enumerate(fixed.tries, 1):
        outcome = f"taken back: {one.objection}" if one.objection else one.then or "none"
        loss = "" if one.loss is None else f"{one.loss:.4g}"
        table.add_row(f"fix-{number}", ", ".join(one.where), outcome, str(one.steps), loss)
    console = console_for(sys.stderr)
    console.print(table)
    console.print(_outcome(fixed), markup=False, highlight=False)
    sys.stdout.write(fixed.patch)


def _outcome(fixed: Fixed) -> str:
    if not fixed.healthy:
        gone = "with the edit this failure is gone, but " if fixed.after is not fixed.before else ""
        return f"NOT FIXED: {gone}{fixed.why_not}."
    edits = counted(sum(not one.objection for one in fixed.tries), "edit")
    return (
        f"FIXED: with {edits} the program runs without a finding."
        if fixed.tries
        else "HEALTHY: there is nothing to fix."
    )


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
