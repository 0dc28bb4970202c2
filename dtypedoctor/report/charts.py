"""Line charts as inline SVG, drawn without any script so that they print and open anywhere."""

import math
from collections.abc import Sequence

from dtypedoctor.report.elements import Html, el, join
from dtypedoctor.report.numbers import number

__all__ = ["line_chart"]

_WIDTH, _HEIGHT = 360, 170
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 10, 12, 22

Values = Sequence[float | None]


def line_chart(title: str, lines: Sequence[tuple[str, Values]]) -> Html:
    """One line per run over the steps; a missing or non-finite value is a gap, a lone value a dot.

    Lines differ in dash and marker as well as in colour. Returns nothing if there is no finite value at all.
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
