"""Where ``exec`` runs a script again: in a copy-on-write view of the working directory, or in that directory if the user agrees."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from dtypedoctor.cli.live import label_in_words
from dtypedoctor.errors import UsageError
from dtypedoctor.interruptions import say
from dtypedoctor.runner.view import Before, NoViewError, Written, in_view, require_view, why_no_view

OPTION = "--rerun-in-place"
_MOST_NAMED = 20


class Reruns:
    """The runs of a script after the first. Use as a context manager around all of them.

    Args:
        in_place: whether the user has agreed that they change the files of the working directory.

    Raises:
        UsageError: there is no working directory, or no view of it can be made, the user has not agreed, and there is no terminal to ask on.
    """

    def __init__(self, *, in_place: bool) -> None:
        self._in_place = in_place
        self._no_view = ""
        self._before: Before | None = None
        self._written: Written | None = None
        self._resources = ExitStack()
        if in_place:
            return
        try:
            folder = Path.cwd()
        except OSError as error:
            raise UsageError(
                f"the working directory cannot be read ({error.strerror}), so no other run can start in it",
                "Change to a directory that exists.",
            ) from error
        try:
            self._before = self._resources.enter_context(Before(folder))
            require_view(folder)
        except (NoViewError, OSError) as error:
            self._no_view = str(error)
        if self._no_view and not _can_ask():
            raise UsageError(
                f"another run needs a copy-on-write view of {folder}, which is not possible here: {self._no_view}",
                f"With {OPTION} it runs in that directory and may change files there; without --rerun, --try, --ablate and "
                "--verify-uninstrumented there is no other run.",
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._resources.close()

    def first_is_over(self) -> None:
        """Notes what the first run has done to the working directory."""
        if self._before is None:
            return
        try:
            self._written = self._before.written()
        except (NoViewError, OSError) as error:
            self._no_view = str(error)

    @contextmanager
    def begin(self, run: Path) -> Iterator[list[str]]:
        """Says on stderr that the script runs again, and where; what is to stand before its command, which records in ``run``.

        Raises:
            UsageError: the user does not want it, or the view could not be made.
        """
        again = f"dtypedoctor: running the script again ({label_in_words(run.name)})"
        if self._before is None or self._written is None or self._no_view:
            self._require_agreement()
            say(f"{again}; it may change files …")
            yield []
            return
        lost = self._before.lost(self._written)
        also = f"; too large to be put back as they were before the first run: {_named(lost)}" if lost else ""
        say(f"{again} in a copy-on-write view of the working directory{also} …")
        with in_view(self._before, self._written, run) as words:
            yield words
        why = why_no_view(run)
        if why:
            raise UsageError(f"its view of the working directory could not be made: {why}", f"Add {OPTION}.")

    def _require_agreement(self) -> None:
        """Asks once whether files may be changed, and names those that the first run has written."""
        if self._in_place:
            return
        if not _can_ask():
            raise UsageError(f"there is no copy-on-write view: {self._no_view}", f"Add {OPTION}.")
        written = list(self._written.paths) if self._written is not None else []
        say(
            f"dtypedoctor: no copy-on-write view is possible here ({self._no_view}), so another run may change files in {Path.cwd()}.\n"
            f"Written by the first run below it: {_named(written) or 'not known'}."
        )
        say("Run the script again there? [y/N] ", end="")
        try:
            self._in_place = sys.stdin.readline().strip().lower() in ("y", "yes")
        except (KeyboardInterrupt, OSError):
            self._in_place = False
        if not self._in_place:
            raise UsageError("you did not want another run in the working directory", f"{OPTION} allows it.")


def _can_ask() -> bool:
    return sys.stdin is not None and os.isatty(0) and os.isatty(2)


def _named(paths: list[str]) -> str:
    """The first of them."""
    more = len(paths) - _MOST_NAMED
    return ", ".join([*paths[:_MOST_NAMED], *([f"{more} more"] if more > 0 else [])])
