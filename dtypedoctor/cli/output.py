"""What a command prints and on what, and the options that several verbs share.

None of this process's standard streams can end a command: their reader may go, and not every one takes every character.
"""

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from dtypedoctor.foreign_files import write_file
from dtypedoctor.interruptions import say
from dtypedoctor.report import FORMATS

if TYPE_CHECKING:
    from rich.console import Console

    from dtypedoctor.report.document import Document
    from dtypedoctor.report.to_json import Report


MOST_PROCESSES = 64


Out = Annotated[Path | None, typer.Option("--out", help="Run directory to create.", show_default="runs/NAME-TIME")]

Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")]

DeviceMap = Annotated[
    str | None,
    typer.Option("--device-map", help="auto: spread the model over all GPUs, in one process.", metavar="auto"),
]

AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Run code that a scenario from outside this directory names.")
]

NprocPerNode = Annotated[
    int | None,
    typer.Option(
        "--nproc-per-node", help="Run in N processes, started by torchrun.", metavar="N", min=1, max=MOST_PROCESSES
    ),
]

EveryNSteps = Annotated[
    int | None,
    typer.Option("--every-n-steps", help="Look at every Nth step: --overhead-budget 1/N.", metavar="N", min=1),
]
OverheadBudget = Annotated[
    str | None,
    typer.Option(
        "--overhead-budget",
        help="How much is looked at: 5% of the time, 1/16 of the steps, off: all.",
        show_default="1% on a GPU, 5% on a CPU",
        metavar="SHARE",
    ),
]


_DESCRIPTORS = (0, 1, 2)


class _Descriptor(io.RawIOBase):
    """Writes to a descriptor. What cannot be written is lost, and the first reason is kept in ``trouble``."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.trouble: OSError | None = None

    def fileno(self) -> int:
        """The descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """It can be written to."""
        return True

    def write(self, data: Any) -> int:
        """Writes some of ``data``; all of it is taken for written once something could not be."""
        while self.trouble is None:
            try:
                return os.write(self._descriptor, data)
            except BlockingIOError:  # somebody has made it so; all that means is that its reader is slow
                select.select([], [self._descriptor], [])
            except OSError as error:
                self.trouble = error
        return len(data)


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Inside, whatever is printed is printed as far as that is possible, and never raises.

    A descriptor that is closed is opened on ``/dev/null``, so that no file of ours gets its number; a character that the
    stream's encoding lacks becomes ``?``.
    """
    for descriptor in _DESCRIPTORS:
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = _never_raising(sys.stdout, 1), _never_raising(sys.stderr, 2)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        sys.stdout, sys.stderr = before


def print_text(text: str) -> None:
    """Writes a finished report to standard output, in UTF-8 whatever the terminal has."""
    sys.stdout.flush()
    sys.stdout.buffer.write((text if text.endswith("\n") else text + "\n").encode("utf-8", "backslashreplace"))
    sys.stdout.flush()


def lost_output() -> OSError | None:
    """Why not all that was printed on standard output has been written there; None where it has been, or nobody reads it any more."""
    sys.stdout.flush()
    trouble = getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "trouble", None)
    return trouble if isinstance(trouble, OSError) and not isinstance(trouble, BrokenPipeError) else None


def _never_raising(stream: TextIO | None, descriptor: int) -> TextIO:
    """The same stream, as one that never raises; one without a descriptor, as tests have it, stays what it is."""
    encoding = "utf-8"
    if stream is not None:
        try:
            stream.flush()
            descriptor, encoding = stream.fileno(), stream.encoding
        except OSError:
            return stream
    raw = _Descriptor(descriptor)
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, "replace", line_buffering=descriptor == 2 or raw.isatty())


def announce(words: str, *, terminal_only: bool = False) -> None:
    """Prints on stderr what begins now. A verb calls it before it imports anything heavy: on a loaded machine that takes seconds.

    Args:
        words: what begins.
        terminal_only: print nothing where stderr is not a terminal, because what is written there belongs to a script.
    """
    if not terminal_only or sys.stderr.isatty():
        say(f"{words} …")


PLAIN_WIDTH = 100
"""Columns when the output is not a terminal."""

_NARROWEST, _WIDEST = 40, 1000
"""Columns between which ``COLUMNS`` is heeded."""


def console_for(stream: TextIO) -> "Console":
    """A console on ``stream``: as wide as the terminal (40 columns at least); plain, 100 columns, when it is piped."""
    from rich.console import Console

    if not stream.isatty():
        text = os.environ.get("COLUMNS", "")
        wanted = int(text[:9]) if text.isascii() and text.isdigit() else 0
        width = min(max(wanted, _NARROWEST), _WIDEST) if wanted else PLAIN_WIDTH
        return Console(file=stream, width=width, no_color=True, force_terminal=False,
                       legacy_windows=False, highlight=False)  # fmt: skip
    console = Console(file=stream, highlight=False)
    return console if console.width >= _NARROWEST else Console(file=stream, highlight=False, width=_NARROWEST)


TERMINAL = "terminal"
_COME_WITH_IT = (TERMINAL, *FORMATS)


def _known(name: str) -> str:
    """``name`` if there is such a format: a typo is reported before anything has run."""
    if name != TERMINAL:
        from dtypedoctor.report.formats import format_named

        format_named(name)
    return name


FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        "-f",
        help="What to print: one of these, or the name of a plug-in's format.",
        metavar=f"[{'|'.join(_COME_WITH_IT)}]",
        callback=_known,
    ),
]


def show(document: "Document", format: str) -> None:
    """Prints ``document`` in a format; except at the prompt, its texts must be redacted.

    Raises:
        UsageError: there is no such format.
    """
    if format == TERMINAL:
        from dtypedoctor.report.to_terminal import print_document

        print_document(document, console_for(sys.stdout))
        return
    from dtypedoctor.report.formats import format_named

    print_text(format_named(format).render(document))


def show_markdown(text: str) -> None:
    """Prints Markdown: drawn, and in the pager where it is longer than the window, at a terminal; else as it is."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.markdown import Markdown

    os.environ.setdefault("LESS", "-FRX")  # colors, and no pager for what fits
    console = console_for(sys.stdout)
    with console.pager(styles=True):
        console.print(Markdown(text, code_theme="ansi_dark"))


def left_in(directory: Path) -> list[str]:
    """Names of the reports in a run directory, the best one to read first; none where nothing could be written there."""
    return [name for name in ("report.html", "report.md", "report.json") if (directory / name).exists()]


ScriptArgument = Annotated[
    str,
    typer.Argument(
        help="Script, command, - for stdin, or what -m or -c takes.",
        metavar="SCRIPT",
    ),
]
OpenPage = Annotated[bool, typer.Option("--open", help="Open report.html in the browser.")]


def leave_page(directory: Path, document: "Document", *, open_it: bool) -> None:
    """Writes ``report.html``, whose texts must be redacted, beside the other reports, and opens it in a browser if that is wanted."""
    from dtypedoctor.report.to_html import render_html

    page = directory / "report.html"
    try:
        write_file(page, render_html(document))
    except OSError as error:
        say(f"dtypedoctor: cannot write {page}: {error.strerror}")
        return
    if open_it:
        import webbrowser

        if not webbrowser.open(page.resolve().as_uri()):
            say(f"dtypedoctor: there is no browser; the page is {page}")


def leave_report_page(directory: Path, report: "Report", *, open_it: bool, bisection: bool = False) -> None:
    """Leaves the page of a run or a bisection, see :func:`leave_page`."""
    from dtypedoctor.redaction.redact import redact
    from dtypedoctor.report.run_document import bisection_document, run_document

    lay_out = bisection_document if bisection else run_document
    leave_page(directory, lay_out(redact(report)), open_it=open_it)
