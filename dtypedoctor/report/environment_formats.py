"""The environment as a table, at the prompt and for tickets."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console

from dtypedoctor.redaction.redact import redact
from dtypedoctor.report.facts import environment_rows
from dtypedoctor.report.markdown_text import code, table
from dtypedoctor.report.terminal_page import Page
from dtypedoctor.report.text import one_line
from dtypedoctor.report.to_json import plain

__all__ = ["ENVIRONMENT_RENDERERS", "render_environment"]

Environment = Mapping[str, Any]

_ROOM = 30_000
_WIDEST = 2_000


def render_environment(environment: Environment, console: Console) -> None:
    """Prints the table on ``console``. It is read to be passed on, so it holds nothing private here either."""
    page = Page(console)
    rows = environment_rows(redact(environment))
    page.table(([page.text(name, "dim"), page.text(one_line(value, _WIDEST))] for name, value in rows), indent=0)


def _markdown(environment: Environment) -> str:
    rows = [[code(name), code(value, _WIDEST)] for name, value in environment_rows(redact(environment))]
    return table(["", ""], rows, _ROOM) + "\n"


def _json(environment: Environment) -> str:
    return json.dumps(plain(redact(environment)), indent=2, allow_nan=False) + "\n"


ENVIRONMENT_RENDERERS: dict[str, Callable[[Environment], str]] = {"md": _markdown, "json": _json}
