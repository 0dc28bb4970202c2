"""HTML elements as text. Whatever is not an element already is escaped, so nothing that comes from elsewhere becomes markup."""

from collections.abc import Iterable, Sequence
from html import escape

from dtypedoctor.report.text import paragraphs

__all__ = ["Html", "el", "join", "table", "text"]


class Html(str):
    """Finished HTML."""

    __slots__ = ()


def text(value: str) -> Html:
    """``value`` as HTML text, invisible characters made visible."""
    return value if isinstance(value, Html) else Html(escape(paragraphs(value, 20_000), quote=True))


def join(parts: Iterable[str]) -> Html:
    """The parts one after the other."""
    return Html("".join(text(part) for part in parts))


def el(tag: str, *children: str, **attributes: str | None) -> Html:
    """The element ``tag`` with ``children``.

    Attribute names lose a trailing underscore and their other underscores become hyphens (``class_``, ``data_fqn``);
    attributes of None are left out.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{text(value)}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Html(f"<{tag}{written}>{join(children)}</{tag}>")


def table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "") -> Html:
    """A table whose first column names its rows; it scrolls sideways where the page is too narrow for it."""
    head = el("thead", el("tr", *(el("th", cell, scope="col") for cell in header))) if header else Html()
    body = (el("tr", el("th", row[0], scope="row"), *(el("td", cell) for cell in row[1:])) for row in rows)
    named = el("caption", caption) if caption else Html()
    inner = el("table", named, head, el("tbody", *body))
    return el("div", inner, class_="scroll", tabindex="0", role="region", aria_label=caption or "table")
