"""PyYAML's syntax errors in plain words."""

import re

import yaml

from dtypedoctor.scenario.problems import Place, Problem, lines_of, printable

__all__ = ["syntax_problem"]

_NO_COLON = "could not find expected ':'"
_WORDS: tuple[tuple[str, str], ...] = (
    (r"found character '\\t' that cannot start", "a tab character; indent and separate with spaces"),
    (r"found character (.+) that cannot start", r"no value can start with \1; put the text in quotes"),
    (
        r"mapping values are not allowed",
        "a ':' where no key can stand; correct the indentation, or put the text in quotes",
    ),
    (_NO_COLON, "there is no ':' after the key"),
    (r"found unexpected end of stream", "the quoted text is never closed"),
    (r"found unexpected document separator", "the quoted text is never closed"),
    (r"expected ',' or '(.)'", r"a ',' or '\1' is missing"),
    (r"expected <block end>", "this does not line up with the lines above; correct the indentation"),
    (r"sequence entries are not allowed", "a '-' where no list can start; put the list on lines of its own"),
    (r"block sequence entries are not allowed", "a '-' where no list can start; put the list on lines of its own"),
    (r"found unknown escape character '(.+)'", r"unknown escape \\\1 in double quotes; use single quotes"),
    (r"expected the node content", "a value is missing"),
    (r"expected '<document start>'", "the value ended before this; correct the indentation, or put the text in quotes"),
)


def syntax_problem(error: yaml.MarkedYAMLError, text: str) -> Problem:
    """Where reading ended and why. The place where an unclosed text, list or mapping starts is named."""
    problem = error.problem or "it cannot be read"
    mark = error.context_mark if problem.startswith(_NO_COLON) else error.problem_mark  # the key, not what follows it
    place = _place(mark) if mark else Place(1, 1)
    tab = _tab_in_indentation(text, place.line)
    if tab is not None:
        return Problem(tab, "a tab in the indentation; indent with spaces")
    words = _in_words(problem)
    start = error.context_mark
    if start is not None and start.line + 1 < place.line and not problem.startswith("expected <block end>"):
        words += f" (in what starts at {_place(start)})"
    return Problem(place, f"not valid YAML: {words}")


def _place(mark: yaml.Mark) -> Place:
    return Place(mark.line + 1, mark.column + 1)


def _in_words(problem: str) -> str:
    for pattern, words in _WORDS:
        match = re.match(pattern, problem)
        if match:
            return match.expand(words)
    return printable(problem[:200].replace(r"'\x00'", "the end of the file"))


def _tab_in_indentation(text: str, line: int) -> Place | None:
    lines = lines_of(text)
    content = lines[line - 1] if line <= len(lines) else ""
    indentation = content[: len(content) - len(content.lstrip(" \t"))]
    return Place(line, indentation.index("\t") + 1) if "\t" in indentation else None
