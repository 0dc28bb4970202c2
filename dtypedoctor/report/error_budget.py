"""Which modules make the rounding error of the loss and of the gradients: what ``exec --error-budget`` has measured, ranked and laid out."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from dtypedoctor.diagnosis.wording import module_name, with_spoken_operators
from dtypedoctor.report.document import Line, Paragraph, Section, Table, named
from dtypedoctor.text import number
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.silent import RoundingShare

_MOST_ROWS = 30
_MEANING = (
    "Of the loss: by how much rounding in the module's own operators has changed it, to first order, over the loss. Share: of the error that such roundings are expected to make. "
    "Of gradients: the error of those that its operators pass on, over their norm. Keep in float32 what is on top."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRow:
    """What rounding in one module's own operators does.

    Attributes:
        module: its dotted name, empty outside of modules.
        loss: change of the loss over the loss, of either sign.
        expected: size of that change if each element were rounded at random.
        share: of the squares of what is expected of all modules.
        gradients: norm of the error of the gradients that its operators pass on, over the norm of these; None where not measured.
        op, source: the operator and line that have changed the loss most.
    """

    module: str
    loss: float
    expected: float
    share: float
    gradients: float | None
    op: str
    source: str


def budget_in(trace: Trace) -> tuple[BudgetRow, ...]:
    """The rows of a run, what is expected to change the loss most first; empty where nothing was measured."""
    last = {seen.fqn or "": seen.what for seen in trace.observed(RoundingShare)}
    total = sum(share.expected**2 for share in last.values()) or 1.0
    rows = [
        BudgetRow(
            module=module,
            loss=share.loss,
            expected=share.expected,
            share=share.expected**2 / total,
            gradients=share.gradients,
            op=share.op,
            source=share.source,
        )
        for module, share in last.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.expected, row.module)))


def budget_section(rows: Sequence[BudgetRow]) -> Section:
    """Lay out the ranking; empty where nothing was measured."""
    title = "Rounding error by module"
    if not rows:
        return Section(title, ())
    names = {row.module for row in rows}
    cells = tuple(
        (
            named(_called(row, names)),
            number(row.loss),
            f"{row.share:.0%}",
            number(row.gradients),
            _spoken(row),
        )
        for row in rows[:_MOST_ROWS]
    )
    table = Table(("module", "of the loss", "share", "of gradients", "mostly"), cells)
    return Section(title, (table, Paragraph(_MEANING)), "error-budget", "Rounding error")


def budget_sentence(rows: Sequence[BudgetRow]) -> str:
    """The first of them, for the terminal; empty where nothing was measured."""
    if not rows:
        return ""
    names = {row.module for row in rows}
    most = ", ".join(f"{_called(row, names)} {row.share:.0%}" for row in rows[:3])
    size = sum(row.expected**2 for row in rows) ** 0.5
    return f"Rounding changes the loss by about {number(size)} of it. Most of that is made in: {most}."


def _spoken(row: BudgetRow) -> Line:
    """Where most of it is made: ``addmm, model.py:12``."""
    operator = with_spoken_operators(row.op)
    name = named(operator.strip("`")) if operator.startswith("`") else operator
    return (name, f", {row.source}") if row.source else name


def _called(row: BudgetRow, names: Collection[str]) -> str:
    return module_name(row.module, names) if row.module else "(outside of modules)"
