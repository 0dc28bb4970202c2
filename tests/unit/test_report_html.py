"""The HTML page as text: whole, closed to the network, and escaped."""

import base64
import hashlib
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_builders import everything, hostile, overflow

from dtypedoctor.diagnosis.rule import Excerpt
from dtypedoctor.report.run_document import run_document
from dtypedoctor.report.to_html import el, render_html
from dtypedoctor.report.to_json import Report

VOID = {"meta"}
NAMES = ["healthy", "overflow", "mismatch", "worker-died", "hostile"]


class Page(HTMLParser):
    """Elements, attributes and texts of a page; fails where elements are not closed in order."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.raw: dict[str, list[str]] = {}
        self.texts: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        here = self.open[-1] if self.open else ""
        if here in ("script", "style"):
            self.raw.setdefault(here, []).append(data)
        else:
            self.texts.append(data)


@pytest.mark.parametrize("report", everything(), ids=NAMES)
def test_a_page_is_well_formed_and_asks_nobody_for_anything(report: Report) -> None:
    """Every element is closed, ids are unique, and nothing is loaded: links are all there is to other places."""
    page = Page(render_html(run_document(report)))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert "src" not in attributes
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        if tag == "a":
            assert attributes["href"].startswith(("#", "https://"))


@pytest.mark.parametrize("report", everything(), ids=NAMES)
def test_only_our_own_script_and_style_may_run(report: Report) -> None:
    """The policy names them by their hashes and forbids everything else."""
    page = Page(render_html(run_document(report)))
    (policy,) = [a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a]
    (style,), (script,) = page.raw["style"], page.raw["script"]
    for kind, content in (("style", style), ("script", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_hostile_texts_are_shown_and_not_run() -> None:
    """The script tag of a module name is a text on the page; no element of it exists."""
    page = Page(render_html(run_document(hostile())))
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert "<script>alert(1)</script>" in " ".join(page.texts)
    source = render_html(run_document(hostile()))
    assert "\x1b" not in source
    assert "\u202e" not in source


@given(st.text())
def test_any_text_is_only_text(value: str) -> None:
    """Whatever is handed in as a text comes out of a parser as one text, in content and in attributes."""
    page = Page(el("p", value, title=value))
    assert [tag for tag, _ in page.elements] == ["p"]
    assert set(page.elements[0][1]) == {"title"}


def test_an_excerpt_marks_what_failed_and_wraps() -> None:
    """No line of carets, which would stand below something else once a long line wraps; what is marked is the text of the line, escaped."""
    excerpt = Excerpt(file="train.py", line=16, function="forward", text="    return a < b", begin=11, end=16)
    page = render_html(run_document(replace(overflow(), excerpts=(excerpt,), headline="`mul` reaches 2e5.")))
    assert "16 |     return <mark>a &lt; b</mark>" in page
    assert "^^^" not in page
    assert "<h1><code>mul</code> reaches 2e5.</h1>" in page
