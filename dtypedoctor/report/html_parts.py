"""Parts of the HTML page: elements as text, charts as inline SVG, and the data of the map that the page's script draws.

Whatever is not an element already is escaped, so nothing that comes from elsewhere becomes markup.
"""

import json
import math
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from dtypedoctor.dtypes import DTYPES
from dtypedoctor.report.document import Map
from dtypedoctor.report.picture import LANES, FlowLine, ModulePicture, OpLine, Picture, Series, TensorLine
from dtypedoctor.report.text import number, paragraphs


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


def table(header: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", *, label: str = "") -> Html:
    """A table whose first column names its rows; it scrolls sideways where the page is too narrow for it."""
    head = el("thead", el("tr", *(el("th", cell, scope="col") for cell in header))) if header else Html()
    body = (el("tr", el("th", row[0], scope="row"), *(el("td", cell) for cell in row[1:])) for row in rows)
    named = el("caption", caption) if caption else Html()
    inner = el("table", named, head, el("tbody", *body))
    return el("div", inner, class_="scroll", tabindex="0", role="region", aria_label=label or caption or "table")


_WIDTH, _HEIGHT = 360, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 10, 12, 22

Values = Sequence[float | None]


def line_chart(title: str, lines: Sequence[tuple[str, Values]]) -> Html:
    """One line per run over the steps; a missing or non-finite value is a gap, a lone value a dot.

    Lines differ in dash and marker as well as in color. Returns nothing if there is no finite value at all.
    """
    known = [value for _, values in lines for value in values if _finite(value)]
    longest = max((len(values) for _, values in lines), default=0)
    if not known or longest < 2:
        return Html()
    low, high = min(known), max(known)  # type: ignore[type-var]
    assert low is not None
    assert high is not None
    if low == high:
        low, high = low - (abs(low) or 1.0) * 0.5, high + (abs(high) or 1.0) * 0.5
    frame = _Frame(longest, low, high)
    drawn = [frame.line(index, values) for index, (_, values) in enumerate(lines)]
    drawn = [frame.axes(), *reversed(drawn)]  # the first run, usually the shortest, lies on top
    picture = el("svg", *drawn, viewBox=f"0 0 {_WIDTH} {_HEIGHT}", role="img", aria_label=f"{title} per step")
    legend = el("ul", *(_entry(index, label) for index, (label, values) in enumerate(lines) if values), class_="legend")
    return el("figure", el("figcaption", f"{title} per step"), picture, legend, class_="chart")


class _Frame:
    def __init__(self, steps: int, low: float, high: float) -> None:
        self._steps, self._low, self._high = steps, low, high

    def _x(self, step: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * step / (self._steps - 1)

    def _y(self, value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - (value - self._low) / (self._high - self._low))

    def axes(self) -> Html:
        parts = []
        for value in (self._low, (self._low + self._high) / 2, self._high):
            y = f"{self._y(value):.1f}"
            parts.append(el("path", d=f"M{_LEFT} {y}H{_WIDTH - _RIGHT}", class_="grid"))
            parts.append(
                el("text", number(value), x=str(_LEFT - 5), y=f"{self._y(value) + 3.5:.1f}", text_anchor="end")
            )
        for step in sorted({0, self._steps // 2, self._steps - 1}):
            anchor = {0: "start", self._steps - 1: "end"}.get(step, "middle")
            parts.append(el("text", str(step + 1), x=f"{self._x(step):.1f}", y=str(_HEIGHT - 6), text_anchor=anchor))
        return join(parts)

    def line(self, index: int, values: Values) -> Html:
        path, points, pen_down = [], [], False
        for step, value in enumerate(values):
            if value is None or not math.isfinite(value):
                pen_down = False
                continue
            place = f"{self._x(step):.1f} {self._y(value):.1f}"
            path.append(f"{'L' if pen_down else 'M'}{place}")
            points.append(f"M{place}h0")
            pen_down = True
        marks = "".join(points) if len(values) <= 60 else ""
        return join(
            (
                el("path", d="".join(path), class_=f"line run{index % 6}"),
                el("path", d=marks, class_=f"dots run{index % 6}") if marks else Html(),
            )
        )


def _entry(index: int, label: str) -> Html:
    sample = el("svg", el("path", d="M0 5H26", class_=f"line run{index % 6}"), viewBox="0 0 26 10", aria_hidden="true")
    return el("li", sample, label)


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


_LANE_TITLES = ("Forward", "Generate", "Backward", "Parameter gradients", "Parameters")


def map_data(shown: Map | None) -> str:
    """The runs of a map as JSON that may stand inside a ``script`` element: no character in it can end that element or begin another.

    Keys are short because they occur once per module; the script names them where it reads them.
    """
    facts = {
        "lanes": [[name, title] for name, title in zip(LANES, _LANE_TITLES, strict=True)],
        "dtypes": {d.name: {"short": d.short, "max": d.max, "tiny": d.tiny} for d in DTYPES.values()},
        "findings": [
            {
                "id": f.id,
                "fqn": f.fqn,
                "op": f.op,
                "phase": f.phase,
                "step": f.step,
                "source": f.source,
                "summary": f.summary,
            }
            for f in (shown.findings if shown is not None else ())
        ],
    }
    runs = ",".join(_picture(picture) for picture in (shown.pictures if shown is not None else ()))
    return _embeddable(f'{{"runs":[{runs}],{_dump(facts)[1:]}')


def _embeddable(text: str) -> str:
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _picture(picture: Picture) -> str:
    modules = ",".join(_module(module) for module in picture.modules)
    rest = {
        "label": picture.label,
        "columns": picture.columns,
        "notes": picture.notes,
        "ops": [_op(op) for op in picture.ops],
    }
    return f'{{"modules":[{modules}],{_dump(rest)[1:]}'


def _module(module: ModulePicture) -> str:
    series = ",".join(_series(series) for series in module.series)
    rest = {
        "r": module.root,
        "f": module.fqn,
        "c": module.cls,
        "t": [_tensor(tensor) for tensor in module.tensors],
        "w": [_flow(flow) for flow in module.flows],
    }
    return f'{{"s":[{series}],{_dump(rest)[1:]}'


def _series(series: Series) -> str:
    # Formatting by hand, to four digits, is five times faster than json and half as long. -1 stands for "not measured".
    numbers = ",".join(["-1" if math.isnan(value) else f"{value:.4g}" for value in series.absmax])
    bad = _dump({str(column): counts for column, counts in series.nonfinite.items()})
    return f"[{LANES.index(series.lane)},{_dump(series.dtype)},[{numbers}],{bad}]"


def _tensor(tensor: TensorLine) -> list[Any]:
    return [
        tensor.what,
        tensor.phase,
        tensor.dtype,
        tensor.shape,
        _rounded(tensor.absmax),
        tensor.num_nan,
        tensor.num_inf,
    ]


def _flow(flow: FlowLine) -> list[Any]:
    return [flow.phase, flow.step, flow.inputs, flow.weights, flow.outputs, flow.autocast, flow.why]


def _op(op: OpLine) -> list[Any]:
    return [op.fqn, op.phase, op.step, op.op, op.inputs, op.outputs, op.source, op.notes, int(op.born)]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}") if math.isfinite(value) else 0.0


def _dump(value: dict[str, Any] | Sequence[Any] | str) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
