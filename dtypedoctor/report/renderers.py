"""The formats, by the name that the command line knows them by."""

from collections.abc import Callable, Sequence

from dtypedoctor.errors import UsageError
from dtypedoctor.plugins import Format, known, registered
from dtypedoctor.redaction.redact import redact
from dtypedoctor.report.github_summary import merge_github_summary, render_github_summary
from dtypedoctor.report.html import render_html
from dtypedoctor.report.junit import merge_junit, render_junit
from dtypedoctor.report.markdown import render_markdown
from dtypedoctor.report.model import Report
from dtypedoctor.report.to_json import render_json

__all__ = ["FORMATS", "MERGED", "RENDERERS", "merger_of", "renderer_of"]

FORMATS = (
    Format(name="md", render=render_markdown),
    Format(name="html", render=render_html),
    Format(name="json", render=render_json),
    Format(name="junit", render=render_junit, merge=merge_junit),
    Format(name="github", render=render_github_summary, merge=merge_github_summary),
)
"""The formats that come with dtypedoctor."""


def _redacted(render: Callable[[Report], str]) -> Callable[[Report], str]:
    return lambda report: render(redact(report))


def _all_redacted(render: Callable[[Sequence[Report]], str]) -> Callable[[Sequence[Report]], str]:
    return lambda reports: render([redact(report) for report in reports])


RENDERERS: dict[str, Callable[[Report], str]] = {one.name: _redacted(one.render) for one in FORMATS}
"""Each takes a report as it was built and leaves out what must not stand in a public ticket."""

MERGED: dict[str, Callable[[Sequence[Report]], str]] = {
    one.name: _all_redacted(one.merge) for one in FORMATS if one.merge is not None
}
"""The formats in which several reports are one document."""


def renderer_of(name: str) -> Callable[[Report], str]:
    """What renders a report as :data:`RENDERERS` do, in a format of dtypedoctor or else of a plug-in.

    Raises:
        UsageError: no format has this name.
    """
    return RENDERERS[name] if name in RENDERERS else _redacted(_plugged_in(name).render)


def merger_of(name: str) -> Callable[[Sequence[Report]], str]:
    """What makes one document of several reports, in a format of dtypedoctor or else of a plug-in.

    Raises:
        UsageError: no format has this name, or it has no such document.
    """
    if name in MERGED:
        return MERGED[name]
    merge = None if name in RENDERERS else _plugged_in(name).merge
    if merge is None:
        raise UsageError(
            f"--format {name}: several scenarios have no common report in this format",
            f"Name one scenario's folder, or use --format {' or '.join(MERGED)}.",
        )
    return _all_redacted(merge)


def _plugged_in(name: str) -> Format:
    found = registered(Format).get(name)
    if found is None:
        raise UsageError(f"--format: there is no format {name!r}", known(Format))
    return found
