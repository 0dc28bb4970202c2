"""Hooks of the documentation's site: README is its first page, a finding's title is the message that people paste, links to code stay text."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
_MESSAGE = re.compile(r"^- .*?`([^`\n]{12,160})`", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Adds README as the first page."""
    text = (ROOT / "README.md").read_text("utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Gives a finding the title under which it is looked for, and leaves no link to what is not on the site."""
    path = page.file.src_uri
    if path.startswith("findings/") and "README" not in path:
        looks = markdown.partition("## What it looks like")[2].partition("\n## ")[0]
        message = _MESSAGE.search(looks)
        page.meta["title"] = message[1] if message else page.meta.get("title", path)

    def kept(link: re.Match[str]) -> str:
        target = link[3].partition("#")[0]
        inside = ((ROOT / "docs" / path).parent / target).resolve()
        is_shown = inside.is_relative_to(ROOT / "docs") and not any(
            part.startswith(".")
            for part in inside.relative_to(ROOT / "docs").parts  # which a site leaves out
        )
        return link[0] if not target or target.startswith(("http", "mailto:")) or is_shown else link[2]

    return _LINK.sub(kept, markdown)
