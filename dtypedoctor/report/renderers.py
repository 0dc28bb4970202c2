"""The formats, by the name that the command line knows them by."""

from collections.abc import Callable

from dtypedoctor.report.markdown import render_markdown
from dtypedoctor.report.model import Report
from dtypedoctor.report.to_json import render_json

__all__ = ["RENDERERS"]

RENDERERS: dict[str, Callable[[Report], str]] = {
    "md": render_markdown,
    "json": render_json,
}
