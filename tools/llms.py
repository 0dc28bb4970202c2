"""Writes ``docs/llms.txt``, the index of the documentation for language models (llmstxt.org), from the pages themselves.

    python tools/llms.py

A test says when it is stale.
"""

import re
from pathlib import Path

from dtypedoctor.diagnosis import by_family

DOCS = Path(__file__).resolve().parents[1] / "docs"
PLACE = DOCS / "llms.txt"
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)


def text() -> str:
    """The file as it should be: what README says the program is, then each page that its list of documentation names, then the findings."""
    readme = (DOCS.parent / "README.md").read_text("utf-8")
    listed = readme.partition("## Documentation")[2].partition("\n\nTests")[0]
    pages = [(title, DOCS.parent / target) for title, target in _LINK.findall(listed)]
    lines = [
        "# dtypedoctor",
        "",
        f"> {readme.splitlines()[2]}",
        "",
        "A coding agent begins with `dtypedoctor skill`, which prints three commands and how to read what they leave.",
        "",
        "## Docs",
        "",
        *(f"- [{title}]({page.relative_to(DOCS)}){_headings(page)}" for title, page in pages),
        "",
        "## Findings",
        "",
        *(f"- [{spec.id}](findings/{spec.id}.md): {spec.title}" for specs in by_family().values() for spec in specs),
    ]
    return "\n".join(lines) + "\n"


def _headings(page: Path) -> str:
    """What a page is about, in the words of its sections, as the end of a line; empty where it has none."""
    headings = _HEADING.findall(_FENCE.sub("", page.read_text("utf-8")))
    return ": " + _LINK.sub(r"\1", "; ".join(headings)) if headings else ""


if __name__ == "__main__":
    PLACE.write_text(text(), encoding="utf-8")
