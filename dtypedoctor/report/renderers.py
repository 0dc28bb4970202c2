"""The formats, by the name that the command line knows them by."""

from collections.abc import Callable, Sequence

from dtypedoctor.redaction.redact import redact
from dtypedoctor.report.github_summary import merge_github_summary, render_github_summary
from dtypedoctor.report.html import render_html
from dtypedoctor.report.junit import merge_junit, render_junit
from dtypedoctor.report.markdown import render_markdown
from dtypedoctor.report.model import Report
from dtypedoctor.report.to_json import render_json

__all__ = ["MERGED", "RENDERERS"]


def _redacted(render: Callable[[Report], str]) -> Callable[[Report], str]:
    return lambda report: render(redact(report))


RENDERERS: dict[str, Callable[[Report], str]] = {
    "md": _redacted(render_markdown),
    "html": _redacted(render_html),
    "json": _redacted(render_json),
    "junit": _redacted(render_junit),
    "github": _redacted(render_github_summary),
}
"""Each takes a report as it was built and leaves out what must not stand in a public ticket."""


def _all_redacted(render: Callable[[Sequence[Report]], str]) -> Callable[[Sequence[Report]], str]:
    return lambda reports: render([redact(report) for report in reports])


MERGED: dict[str, Callable[[Sequence[Report]], str]] = {
    "junit": _all_redacted(merge_junit),
    "github": _all_redacted(merge_github_summary),
}
"""The formats in which several reports are one document."""
