"""The formats that come with dtypedoctor. A new one is a function of a document and a line here."""

from dtypedoctor.errors import UsageError
from dtypedoctor.plugins import Format, known, registered
from dtypedoctor.report.to_html import render_html
from dtypedoctor.report.to_json import render_data
from dtypedoctor.report.to_junit import render_junit
from dtypedoctor.report.to_markdown import render_job_summary, render_markdown

FORMATS = (
    Format(name="md", suffix=".md", render=render_markdown),
    Format(name="html", suffix=".html", render=render_html, shows_runs=True),
    Format(name="json", suffix=".json", render=render_data),
    Format(name="junit", suffix=".xml", render=render_junit),
    Format(name="github", suffix=".md", render=render_job_summary),
)


def format_named(name: str) -> Format:
    """The format of that name, of dtypedoctor or else of a plug-in.

    Raises:
        UsageError: there is none.
    """
    found = registered(Format).get(name)
    if found is None:
        raise UsageError(f"--format: there is no format {name!r}", f"At the prompt: terminal. {known(Format)}")
    return found
