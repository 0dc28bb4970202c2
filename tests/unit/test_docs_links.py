"""The links between the pages of the documentation lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:)([^)\s]*)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """What GitHub names the headings of a page."""
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in _HEADING.findall(text))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in plain}


def test_every_relative_link_of_the_page_leads_somewhere(subtests: pytest.Subtests) -> None:
    """The file exists, and so does the heading."""
    for page in PAGES:
        with subtests.test(str(page.relative_to(ROOT))):
            text = _FENCE.sub("", page.read_text(encoding="utf-8"))
            broken = []
            for link in _LINK.findall(text):
                path, _, anchor = link.partition("#")
                target = (page.parent / path).resolve() if path else page
                if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                    broken.append(link)
            assert broken == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    """Directly or through another page; a page that nothing leads to is read by nobody."""
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md" or not page.is_file():
            continue
        seen.add(page)
        waiting += [(page.parent / link.partition("#")[0]).resolve() for link in _LINK.findall(page.read_text("utf-8"))]
    assert sorted(str(page.relative_to(ROOT)) for page in set(PAGES) - seen) == []


@pytest.mark.parametrize("page", ["architecture.md", "contributing.md", "internals.md"])
def test_every_module_that_a_developer_is_sent_to_exists(page: str) -> None:
    """In running text from the package or one of its rooms on, in commands from the root; NAME stands for one to write."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w./*-])(?:[a-z_\d]+/)*[a-z_\d]+\.py\b", text))
    modules = [
        path.relative_to(ROOT).as_posix()
        for room in ("dtypedoctor", "docs", "tests", "tools")
        for path in (ROOT / room).rglob("*.py")
    ]
    assert named
    assert sorted(name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in modules)) == []


def test_every_room_of_the_house_is_on_its_plan() -> None:
    """Each package has its one reason to change in the table of the architecture."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in (ROOT / "dtypedoctor").glob("*/__init__.py")}
    assert rooms == set(re.findall(r"^\| `(\w+)/` \|", text, re.MULTILINE))
