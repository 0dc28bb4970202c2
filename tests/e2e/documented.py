"""The command lines that the documentation shows."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *(ROOT / "dtypedoctor" / "skills").rglob("*.md")]

SHELLS = frozenset({"bash", "console", "sh", "shell"})
_FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_EXAMPLE = re.compile(r"^<!-- run -->\n```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(?<!`)`(dtypedoctor [^`\n]+)`(?!`)")
_STEP = re.compile(r"^[ -]*run: (.*\bdtypedoctor .*)$", re.MULTILINE)
_PLACEHOLDER = re.compile(r"(?:^|/)[A-Z][A-Z_]+\d*(?:$|/|\.)|^\.\.\.$|…")
_ENDS = frozenset({"&&", "||", ";", "|", "&"})


@dataclass(frozen=True, kw_only=True)
class Command:
    """One simple command of a page.

    Attributes:
        place: page and line, for messages.
        words: the program, without the folder that it is in, and its arguments.
        inline: whether it stands in running text, where a verb may be named without its arguments.
    """

    place: str
    words: tuple[str, ...]
    inline: bool = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """All but the program."""
        return self.words[1:]

    @property
    def has_placeholder(self) -> bool:
        """Whether something stands for what the reader has to fill in: RUN, YOUR/MODEL, …"""
        return any(_PLACEHOLDER.search(word) for word in self.arguments)

    def __str__(self) -> str:
        return f"{self.place}: {shlex.join(self.words)}"


def documented_commands() -> list[Command]:
    """Every command of a shell block, of a workflow step, and of the running text, page by page."""
    return [command for page in PAGES for command in _of_page(page)]


def marked_examples() -> dict[str, str]:
    """The Python blocks that a page marks to be run with an HTML comment, by their place."""
    found = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for example in _EXAMPLE.finditer(text):
            found[_place(page, text, example.start(1))] = example[1]
    return found


def _of_page(page: Path) -> Iterator[Command]:
    text = page.read_text(encoding="utf-8")
    for fence in _FENCE.finditer(text):
        language, body = fence.groups()
        if language in SHELLS:
            yield from _of_script(_place(page, text, fence.start(2)), _typed(language, body))
        elif language in ("yaml", "yml"):
            for step in _STEP.finditer(body):
                yield from _of_script(_place(page, text, fence.start(2) + step.start()), step[1])
    prose = _FENCE.sub(lambda fence: re.sub(r"[^\n]", " ", fence[0]), text)
    for span in _INLINE.finditer(prose):
        yield Command(place=_place(page, text, span.start()), words=tuple(shlex.split(span[1])), inline=True)


def _typed(language: str, body: str) -> str:
    """What a person types: in a console block the lines behind a prompt, without what the program answers."""
    if language != "console":
        return body
    return "\n".join(line.removeprefix("$ ") for line in body.splitlines() if line.startswith("$ "))


def _of_script(place: str, script: str) -> Iterator[Command]:
    for line in script.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for token in [*lexer, ";"]:
            if token not in _ENDS:
                words.append(token)
                continue
            command = _simple(words)
            if command:
                yield Command(place=place, words=command)
            words = []


def _simple(words: list[str]) -> tuple[str, ...]:
    """A command without its redirections and without the variables set for it."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in (">", ">>", "<"):
            next(rest, None)
        elif kept or not re.fullmatch(r"\w+=.*", word):
            kept.append(word)
    return (Path(kept[0]).name, *kept[1:]) if kept else ()


def _place(page: Path, text: str, position: int) -> str:
    return f"{page.relative_to(ROOT)}:{text.count(chr(10), 0, position) + 1}"
