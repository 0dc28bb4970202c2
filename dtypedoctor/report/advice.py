"""What to do about a finding and where it shows, as every length of a report lays it out."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.rule import Advice, Edit, Excerpt
from dtypedoctor.report.document import Block, Code, Heading, Paragraph
from dtypedoctor.text import counted

MOST_LINES = 12
"""Changed lines that the first screen always shows; where there are more it names the patch that has all."""
PATCH = "do-this.patch"
"""The edits for the first finding, in the run directory."""


def where_it_shows(excerpts: tuple[Excerpt, ...]) -> tuple[Block, ...]:
    """The excerpts with a caret under what failed, as compilers show it."""
    return (
        (Heading("where"), Code("\n".join(line for one in excerpts for line in _lines(one)), "text"))
        if excerpts
        else ()
    )


def _lines(one: Excerpt) -> Iterator[str]:
    margin = " " * len(str(one.line))
    if one.skipped:
        yield f"{margin} … {counted(one.skipped, 'frame')}"
    yield f"{margin}--> {one.file}:{one.line}" + (f" in {one.function}" if one.function else "")
    yield f"{margin} |"
    yield f"{one.line} | {one.text}"
    if one.end > one.begin:
        yield f"{margin} | {' ' * one.begin}{'^' * (one.end - one.begin)}"


def do_this(advice: Advice, most: int | None = None, patch: str = "") -> tuple[Block, ...]:
    """The advice: the sentence, then the change as a unified diff.

    Args:
        advice: what to do.
        most: changed lines that are shown where there are more than :data:`MOST_LINES`; None for all.
        patch: the file that holds all of them, as it is typed.
    """
    if not advice.text:
        return ()
    cut = most is not None and len(advice.edits) > MOST_LINES
    diff = [Code(diff_of(advice.edits[:most] if cut else advice.edits), "diff")] if advice.edits else []
    rest = counted(len(advice.edits) - (most or 0), "more changed line")
    left = [Paragraph(f"… and {rest}. Apply all: patch -p0 < {patch}")] if cut else []
    code = [Code(advice.code, "python")] if advice.code else []
    return (Heading("do this"), Paragraph(advice.text), *diff, *left, *code)


def diff_of(edits: tuple[Edit, ...]) -> str:
    """The edits as a unified diff, which `patch -p0` takes."""
    lines, moved, file = [], 0, ""
    for edit in edits:
        if edit.file != file:
            lines += [f"--- {edit.file}", f"+++ {edit.file}"]
            moved, file = 0, edit.file
        new = edit.new.split("\n") if edit.new else []
        begin = edit.line + moved if new else edit.line + moved - 1
        count = "" if len(new) == 1 else f",{len(new)}"
        lines += [f"@@ -{edit.line} +{begin}{count} @@", f"-{edit.old}", *(f"+{line}" for line in new)]
        moved += len(new) - 1
    return "\n".join(lines)
