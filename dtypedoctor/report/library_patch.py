"""A fix, for people: what it changes, where it can be put in, whether it fits a library's source, a patch to propose."""

import contextlib
from collections.abc import Iterator
from difflib import unified_diff
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from dtypedoctor.errors import UsageError
from dtypedoctor.plugins import Correction
from dtypedoctor.source_edits import AlreadyCorrectedError, TargetMismatchError, file_of, files_of, patched, release_of

if TYPE_CHECKING:
    from dtypedoctor.examination.fixes import Reach


def about(reach: "Reach") -> str:
    """What a fix changes, in a library line by line, and what can be done with it."""
    remedy = reach.remedy
    unsafe = "" if remedy.safe else " (not safe: it may hide what disagrees)"
    lines = [f"{remedy.id}: {remedy.summary}{unsafe}"]
    if reach.edited:
        lines += [f"Tried on {reach.releases}.", ""]
        for edit in reach.edited.edits:
            lines.append(f"{edit.module}.{edit.function}")
            lines += [f"  - {line}" for line in edit.old.strip("\n").splitlines()]
            lines += [f"  + {line}" for line in edit.new.strip("\n").splitlines()]
    lines.append("")
    if reach.tried_by:
        lines.append(f"Does it fix a script?  dtypedoctor exec {reach.tried_by} train.py")
    if reach.kept:
        lines.append(f"Keep it in place:      dtypedoctor treat --with {remedy.id} train.py")
    if reach.applied:
        lines.append(f'In one line of Python: dtypedoctor.apply(model, "{remedy.id}")')
    if reach.edited:
        lines.append(f"Propose it upstream:   dtypedoctor explain {remedy.id} --patch")
    if remedy.by_hand:
        lines.append(f"In your own script:    {remedy.by_hand}")
    if not reach.tried_by:
        lines.append(f"In a scenario only:    remedies: [{remedy.id}]")
    if reach.released:
        lines.append(f"In a released library: {', '.join(reach.released)}")
    return "\n".join(lines)


def check(correction: Correction, folders: list[str]) -> None:
    """Compares what a correction edits with the library's files, where they can be found; nothing of the library is imported.

    Raises:
        UsageError: a file is not what the correction was written for. One that has the correction already is all right.
    """
    for file, shown, edits in files_of(correction.edits, folders):
        with contextlib.suppress(AlreadyCorrectedError), _fitting(correction, file):
            patched(file.read_text(encoding="utf-8"), edits, shown)


@contextlib.contextmanager
def _fitting(correction: Correction, file: Path) -> Iterator[None]:
    """Names the release and those that were tried where a file is not what a correction was written for."""
    try:
        yield
    except AlreadyCorrectedError:
        raise
    except TargetMismatchError as error:
        release = f"{correction.library} {release_of(correction.library, file)}".strip()
        raise UsageError(
            f"{correction.id} does not fit {release}: {error}",
            f"It was tried on {correction.library} {', '.join(correction.seen)}.",
        ) from error


def patch_of(correction: Correction, folders: list[str]) -> str:
    """A diff against the library's source, for ``git apply`` or ``patch -p1``, that adds the test as well.

    Raises:
        UsageError: the library is not there, or its source is not what the correction was written for.
    """
    library = correction.library
    found = list(files_of(correction.edits, folders))
    package = file_of(library, folders)
    if not found and package is not None:
        with _fitting(correction, package):
            raise TargetMismatchError(f"it has no {correction.edits[0].module}")
    if not found:
        hint = f"pip install --no-deps --target DIR {library}=={correction.seen[-1]}, then pass --source DIR."
        raise UsageError(f"{correction.id}: the package {library} was not found", hint)
    diffs: list[str] = []
    for file, shown, edits in found:
        text = file.read_text(encoding="utf-8")
        try:
            with _fitting(correction, file):
                diffs += _diff(text, patched(text, edits, shown), f"a/{shown}", f"b/{shown}")
        except AlreadyCorrectedError as error:
            raise UsageError(
                f"{correction.id} is not needed: {library} {release_of(library, file)}: {error}"
            ) from error
    if correction.test:
        test = files("dtypedoctor.lab.corrections.libraries").joinpath(correction.test).read_text(encoding="utf-8")
        name = correction.id.replace("-", "_")
        diffs += _diff("", test, "/dev/null", f"b/tests/test_{name}.py")
    return "".join(diffs)


def _diff(before: str, after: str, old: str, new: str) -> Iterator[str]:
    for line in unified_diff(before.splitlines(keepends=True), after.splitlines(keepends=True), old, new):
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
