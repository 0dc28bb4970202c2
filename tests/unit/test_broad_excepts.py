"""What catches every exception keeps some that mean the program; there are few such places, and each says why."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtypedoctor

PACKAGE = Path(dtypedoctor.__file__).parent
MOST = 6
BROAD = frozenset({"Exception", "BaseException"})


def broad(source: str) -> Iterator[int]:
    """Lines on which every exception is caught: by ``except`` alone or of a class that all are of, or by ``suppress``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and (node.type is None or BROAD & _names(node.type)):
            yield node.lineno
        elif isinstance(node, ast.Call) and "suppress" in _names(node.func):
            yield from (node.lineno for one in node.args if BROAD & _names(one))


def _names(node: ast.expr) -> set[str]:
    """Names in an expression, and the last parts of dotted ones."""
    found = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return found | {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}


@pytest.mark.parametrize(
    "code",
    [
        "try:\n    f()\nexcept:\n    pass",
        "try:\n    f()\nexcept Exception:\n    pass",
        "try:\n    f()\nexcept (ValueError, BaseException) as error:\n    pass",
        "try:\n    f()\nexcept builtins.Exception:\n    pass",
        "with suppress(Exception):\n    f()",
        "with contextlib.suppress(BaseException):\n    f()",
    ],
)
def test_every_way_to_catch_everything_counts_as_broad(code: str) -> None:
    """Each way to catch everything is found, and one that names an error is not."""
    assert list(broad(code))
    assert not list(
        broad(
            code.replace("BaseException", "OSError")
            .replace("Exception", "OSError")
            .replace("except:", "except OSError:")
        )
    )


def test_few_and_each_with_its_reason() -> None:
    """At most six places of the package catch everything, and each has a comment that says why."""
    found = [
        (path.relative_to(PACKAGE), number, path.read_text("utf-8").splitlines()[number - 1])
        for path in sorted(PACKAGE.rglob("*.py"))
        for number in broad(path.read_text("utf-8"))
    ]
    assert len(found) <= MOST, found
    assert [(str(path), number) for path, number, line in found if "# " not in line] == []
