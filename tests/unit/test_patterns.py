"""Regular expressions are compiled when they are first used, in every module of the package."""

import ast
import copy
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dtypedoctor
from dtypedoctor.patterns import regex

MODULES = sorted(Path(dtypedoctor.__file__).parent.rglob("*.py"))


def test_a_pattern_is_compiled_at_its_first_use():
    """What is wrong with its text shows then and not before."""
    late = regex("(")
    with pytest.raises(re.error):
        late.match("")


def test_a_lazy_pattern_does_what_the_compiled_one_does():
    """Methods, attributes and flags are those of the standard library's pattern, also in a copy."""
    late, made = regex("(a)b", re.IGNORECASE), re.compile("(a)b", re.IGNORECASE)
    for one in (late, copy.deepcopy(late)):
        assert one.sub(r"\1", "xABx") == made.sub(r"\1", "xABx") == "xAx"
        assert (one.pattern, one.flags, one.groups) == (made.pattern, made.flags, made.groups)


def compiled_at_import(module: Path) -> Iterator[int]:
    """The lines outside of functions that call ``re.compile``."""
    waiting: list[ast.AST] = list(ast.parse(module.read_text(encoding="utf-8")).body)
    for node in waiting:  # which grows meanwhile
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "re.compile":
            yield node.lineno
        waiting += ast.iter_child_nodes(node)


def test_no_module_compiles_a_pattern_when_it_is_imported() -> None:
    """``re.compile`` is called in functions only."""
    assert not [f"{module.name}:{line}" for module in MODULES for line in compiled_at_import(module)]
