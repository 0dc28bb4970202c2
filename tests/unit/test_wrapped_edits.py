"""An edit stays right whatever stands around what it changes: both programs are executed."""

from pathlib import Path
from typing import Any

import pytest
from test_edits_of_classes import edited, failing, program
from traces import tensor

WRAPPED = (
    "y = ({e}).mul(3.0)",
    "y = -{e}",
    "y = {e} ** 2",
    "y = 1 - {e} * 2",
    "y = f({e}, k={e2})",
    "y = [{e} for _ in range(2)][1]",
    "with torch.no_grad():\n    y = {e}",
    "y = ({e}).abs().sum().sqrt()",
    "({e}).sum().backward()\ny = x.grad",
    "y = (\n    1 +\n    {e}\n)",
    "y = {e} if True else None",
)
"""What may stand around an expression."""

IN_DOMAIN = (
    ("torch.log(x)", "log"), ("(x + z).log()", "log"), ("x / n", "div"), ("x / (n + z)", "div"), ("torch.div(x, n)", "div"),
    ("x / x.norm()", "div"), ("torch.sqrt(x)", "sqrt"), ("x.exp()", "exp"), ("torch.acos(x / 8)", "acos"),
    ("F.cross_entropy(logits, labels)", "nll_loss_forward"), ("x.std(0)", "std"),
)  # fmt: skip
"""Functions that have a domain, and the operators that leave it."""


def operands() -> dict[str, Any]:
    """What the programs compute with, inside of all domains."""
    import torch

    return {
        "torch": torch,
        "F": torch.nn.functional,
        "f": lambda one, k=0.0: one + k,
        "x": torch.tensor([1.0, 2.0, 3.0], requires_grad=True),
        "n": torch.tensor([1.0, -2.0, 4.0]),
        "z": torch.tensor(0.0),
        "logits": torch.tensor([[1.0, 2.0], [0.5, 0.1]], requires_grad=True),
        "labels": torch.tensor([1, 0]),
    }


def run(text: str, given: dict[str, Any]) -> Any:
    """What ``y`` is after a program."""
    exec(text, given)  # noqa: S102  (the text is that of these tests)
    return given["y"]


def wrapped(around: str, expression: str, *, more: str = "0") -> str:
    """A program with the expression, in parentheses where it needs them, and its line."""
    is_call = expression.endswith(")") and not expression.startswith(("x /", "a @"))
    return around.format(e=expression if is_call else f"({expression})", e2=more)


@pytest.mark.parametrize("around", WRAPPED)
@pytest.mark.parametrize(("expression", "op"), IN_DOMAIN)
def test_a_bound_changes_nothing_inside_of_the_domain(around: str, expression: str, op: str, tmp_path: Path) -> None:
    """The edited program has the very result of the program as it is."""
    text = wrapped(around, expression)
    if "x.grad" in text and "x" not in expression.replace("exp", ""):
        text = text.replace("x.grad", "logits.grad")
    line = next(number for number, part in enumerate(text.splitlines(), 2) if expression in part)
    read = program(tmp_path, text, op=f"aten.{op}.default", source=f"train.py:{line}")
    after = edited(read, "keep-in-domain")
    assert after
    before, now = run(text, operands()), run(after, operands())
    assert before.equal(now), after


CASTS = (
    ("a @ w", "(a.to(torch.bfloat16) @ w)"),
    ("torch.mm(a, w)", "torch.mm(a.to(torch.bfloat16), w)"),
    ("a.mm(w)", "a.to(torch.bfloat16).mm(w)"),
    ("(a * 2).mm(w)", "(a * 2).to(torch.bfloat16).mm(w)"),
)
"""Products of two dtypes, and what is meant."""


@pytest.mark.parametrize("around", [one for one in WRAPPED if "x.grad" not in one])
@pytest.mark.parametrize(("expression", "meant"), CASTS)
def test_a_cast_is_of_the_operand_alone(around: str, expression: str, meant: str, tmp_path: Path) -> None:
    """The program as it is raises; the edited one computes what is meant."""
    import torch

    text = wrapped(around, expression)
    program(tmp_path, text)
    number = next(number for number, part in enumerate(text.splitlines(), 2) if expression in part)
    given = [tensor(1, dtype="float32"), tensor(2, dtype="bfloat16")]
    builder = failing(tmp_path, (number, expression, ""), inputs=given)
    after = edited(program(tmp_path, text, builder, id="operand-dtype-mismatch", dtype="float32"), "cast-operand")
    matrices = operands() | {"a": torch.eye(2) * 1.5, "w": torch.ones(2, 2, dtype=torch.bfloat16)}
    with pytest.raises(RuntimeError, match="dtype"):
        run(text, dict(matrices))
    assert run(after, dict(matrices)).equal(run(wrapped(around, meant), dict(matrices))), after
