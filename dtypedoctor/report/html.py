"""One HTML file that opens from disk, asks the network for nothing, and shows where the magnitudes go."""

import base64
import hashlib
from importlib import resources

from dtypedoctor import __version__
from dtypedoctor.report import html_runs
from dtypedoctor.report import html_sections as sections
from dtypedoctor.report.bisection_html import bisection_part
from dtypedoctor.report.elements import Html, el
from dtypedoctor.report.html_data import page_data
from dtypedoctor.report.model import Report
from dtypedoctor.report.text import one_line

__all__ = ["render_html"]

_NAVIGATION = (
    ("verdict", "Verdict"),
    ("remedies", "Remedies"),
    ("compare", "Before and after"),
    ("map", "Magnitudes"),
    ("flow", "Dtype flow"),
    ("trust", "Trust"),
    ("reproduce", "Reproduce"),
)
_SCRIPTS = ("page.js", "modules.js", "explorer.js", "detail.js", "controls.js")
"""Plain scripts that share one scope, in this order."""


def render_html(report: Report) -> str:
    """The report as a self-contained page; the heat map and the dtype flow are there if the report has pictures.

    A content security policy allows this page's own style and script by their hashes and nothing else, so that a text
    that should slip through the escaping still cannot run or load anything.
    """
    style, script = _asset("report.css"), "\n".join(map(_asset, _SCRIPTS))
    policy = f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    parts = [
        sections.verdict(report),
        html_runs.remedies(report),
        html_runs.comparison(report),
        _map(report),
        sections.flow(report),
        sections.strip(report) if not report.pictures else Html(),
        bisection_part(report),
        sections.trust(report),
        sections.reproduce(report),
    ]
    page = (
        "<!doctype html>\n",
        '<html lang="en"><head><meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        el("title", f"{one_line(report.name, 80)} – dtypedoctor"),
        f"<style>{style}</style></head><body>",
        _top(parts),
        el("main", *parts),
        el("footer", f"Made by dtypedoctor {__version__}. This page is one file and loads nothing."),
        f'<script type="application/json" id="data">{page_data(report)}</script>',
        f"<script>{script}</script></body></html>\n",
    )
    return "".join(page)


def _asset(name: str) -> str:
    return resources.files("dtypedoctor.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode("utf-8")).digest()).decode("ascii")


def _top(parts: list[Html]) -> Html:
    present = [(anchor, title) for anchor, title in _NAVIGATION if any(f'id="{anchor}"' in part[:60] for part in parts)]
    links = [el("a", title, href=f"#{anchor}") for anchor, title in present]
    theme = el("button", "Light / dark", type="button", id="theme")
    return el(
        "div",
        el("strong", "dtypedoctor", class_="brand"),
        el("nav", *links, aria_label="Sections"),
        theme,
        class_="top",
    )


def _map(report: Report) -> Html:
    if not report.pictures:
        return Html()
    intro = (
        "Each row is a module, each column a step. The colour says how far the largest element stands up the range of its own dtype, "
        "from the smallest normal value to the largest; what is beyond is hatched."
    )
    return el(
        "section",
        el("h2", "Magnitudes, module by module"),
        el("p", intro, class_="dim"),
        el("noscript", el("p", "This part needs JavaScript.", class_="warn")),
        el("div", id="explorer"),
        id="map",
        class_="card wide",
    )
