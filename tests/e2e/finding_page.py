"""A page of ``docs/findings``, taken apart."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "docs" / "findings"

_FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^## (.+)\n", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block: what stands behind the opening fence, and the code."""

    info: str
    code: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """One page. ``sections`` holds the text below each second-level heading, in order."""

    path: Path
    text: str
    front_matter: Mapping[str, Any]
    title: str
    sections: Mapping[str, str]

    @property
    def blocks(self) -> list[Block]:
        """All fenced blocks of the page."""
        return [Block(info=info.strip(), code=code) for info, code in _FENCE.findall(self.text)]

    @property
    def example(self) -> str:
        return next(block.code for block in self.blocks if block.info == "python")


def read_page(path: Path) -> Page:
    """The page at ``path``; a ValueError where it has no front matter or no title."""
    text = path.read_text(encoding="utf-8")
    match = re.match(r"---\n(.*?)\n---\n\n# ([^\n]+)\n\n(.*)", text, re.DOTALL)
    if match is None:
        raise ValueError(f"{path}: no front matter and title")
    _, *parts = _HEADING.split(_without_code(match[3]))
    sections = dict(zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True))
    return Page(path=path, text=text, front_matter=yaml.safe_load(match[1]), title=match[2], sections=sections)


def links(text: str) -> list[str]:
    """The targets of all Markdown links outside code blocks."""
    return _LINK.findall(_without_code(text))


def _without_code(text: str) -> str:
    """Code may hold brackets and number signs; in its place a word remains, so that no section becomes empty."""
    return _FENCE.sub("(code)", text)
