"""Every finding has a page that is complete, linked and true: its example fails as the page says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from forked_script import Ended, run_forked
from nursery import preload
from patience import PATIENCE

from dtypedoctor.diagnosis import finding_ids, spec_of

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


IDS = finding_ids()
SECTIONS = [
    "What it looks like",
    "Why it happens",
    "How it is told apart",
    "How to fix it",
    "Example",
    "References",
]
MARKS = ("python", "python gpu", "python distributed")
LIBRARIES = ("bitsandbytes", "transformers", "peft")

WITH_GPU_BLOCK = [
    path.stem for path in sorted(FOLDER.glob("*.md")) if "```python gpu\n" in path.read_text(encoding="utf-8")
]

pages = cache(lambda: {finding: read_page(FOLDER / f"{finding}.md") for finding in IDS})


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How each example ended, run in children of this process, which imports every library once."""
    examples = {finding: page.example for finding, page in pages().items()}
    needed = frozenset(
        name for name in LIBRARIES if any(f"import {name}" in e or f"from {name}" in e for e in examples.values())
    )
    preload(needed)
    ends = {}
    for finding, code in examples.items():
        folder = tmp_path_factory.mktemp(finding)
        script = folder / "example.py"
        script.write_text(code, encoding="utf-8")
        ends[finding] = run_forked(script, folder, single_threaded)
    return ends


def single_threaded(script: Callable[[], None]) -> None:
    """The script, without threads that its parent may have had and a fork does not take along."""
    import torch

    torch.set_num_threads(1)
    script()


def page_of(finding: str) -> Page:
    return pages()[finding]


def test_there_is_a_page_for_every_id_and_for_nothing_else() -> None:
    """A page without a finding would be found by nobody."""
    assert {path.stem for path in FOLDER.glob("*.md")} == set(IDS) | {"README"}


def test_the_front_matter_names_the_finding_its_family_and_its_severity(subtests: pytest.Subtests) -> None:
    """Programs read it; the heading repeats the title for people."""
    for finding in IDS:
        with subtests.test(finding):
            page = page_of(finding)
            assert list(page.front_matter) == ["id", "family", "severity", "title"]
            spec = spec_of(finding)
            assert page.front_matter["id"] == finding
            assert page.front_matter["family"] == spec.family.id
            assert page.front_matter["severity"] == spec.severity
            assert page.front_matter["title"] == spec.title
            assert page.title.replace("`", "") == page.front_matter["title"]


def test_a_page_has_all_sections_and_is_neither_a_note_nor_a_book(subtests: pytest.Subtests) -> None:
    """The same order everywhere, so that a reader in trouble knows where to look."""
    for finding in IDS:
        with subtests.test(finding):
            page = page_of(finding)
            assert list(page.sections) == SECTIONS
            assert all(page.sections.values())
            assert 40 <= len(page.text.splitlines()) <= 90


def test_a_page_names_neighbours_a_proof_and_public_references(subtests: pytest.Subtests) -> None:
    """Without these three it would be an opinion."""
    for finding in IDS:
        with subtests.test(finding):
            page = page_of(finding)
            told_apart = page.sections["How it is told apart"]
            assert links(told_apart)
            assert re.search(r"counterfactual|replay|settle", told_apart, re.IGNORECASE)
            assert all(target.startswith("https://") for target in links(page.sections["References"]))
            assert links(page.sections["References"])


def test_every_relative_link_leads_to_a_file(subtests: pytest.Subtests) -> None:
    """Pages move; links rot."""
    for path in sorted(FOLDER.glob("*.md")):
        with subtests.test(path.stem):
            relative = [target for target in links(path.read_text(encoding="utf-8")) if "://" not in target]
            assert [target for target in relative if not (path.parent / target).is_file()] == []
            assert path.name not in relative


def test_an_example_is_a_short_script_that_ends_with_an_assertion(subtests: pytest.Subtests) -> None:
    """One block runs on a CPU; others say what they need."""
    for finding in IDS:
        with subtests.test(finding):
            blocks = [block for block in page_of(finding).blocks if block.info]
            assert all(block.info in MARKS for block in blocks)
            assert [block.info for block in blocks].count("python") == 1
            for block in blocks:
                lines = block.code.splitlines()
                assert 8 <= sum(bool(line.strip()) for line in lines) <= 25
                assert max(map(len, lines)) <= 120
                assert isinstance(ast.parse(block.code).body[-1], ast.Assert)


@pytest.mark.release
@pytest.mark.parametrize("finding", IDS)
def test_the_example_shows_the_failure(finding: str, endings: dict[str, Ended]) -> None:
    """The assertions of the script hold, so what the page says does happen."""
    ended = endings[finding]
    assert (ended.raised, ended.message) == (None, ""), ended.output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("finding", WITH_GPU_BLOCK)
def test_the_gpu_example_shows_the_failure(finding: str, tmp_path: Path) -> None:
    """In a process of its own each, since CUDA does not survive a fork."""
    for block in page_of(finding).blocks:
        if block.info == "python gpu":
            script = tmp_path / "example.py"
            script.write_text(block.code, encoding="utf-8")
            done = subprocess.run(
                [sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE, check=False
            )
            assert done.returncode == 0, done.stderr
