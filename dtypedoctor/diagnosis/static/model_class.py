"""What a model's class says of dtypes, read from its source without importing it."""

import ast
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["kept_in_float32"]

LISTS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
"""Class attributes of transformers' models: what stays float32 when loaded as float16, and what stays so in any dtype."""


def kept_in_float32(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The lists of the classes that the installed transformers has for ``config["model_type"]``; empty without any.

    The lists of all classes in the model's file are joined, since a model is made of several of them.
    """
    kind = config.get("model_type")
    source = _source(kind) if isinstance(kind, str) and kind.isidentifier() else None
    return _lists(source) if source is not None else {}


def _source(kind: str) -> Path | None:
    package = find_spec("transformers")
    if package is None or package.origin is None:
        return None
    path = Path(package.origin).parent / "models" / kind / f"modeling_{kind}.py"
    return path if path.is_file() else None


@cache
def _lists(source: Path) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                name, values = _assigned(statement)
                if name in LISTS:
                    found.setdefault(name, []).extend(values)
    return {name: tuple(dict.fromkeys(values)) for name, values in found.items() if values}


def _assigned(statement: ast.stmt) -> tuple[str, list[str]]:
    """Name and value of ``name = ["text", …]``; an empty name for anything else."""
    if not (isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)):
        return "", []
    try:
        value = ast.literal_eval(statement.value)
    except ValueError:
        return "", []
    return statement.targets[0].id, [text for text in value or () if isinstance(text, str)] if isinstance(
        value, (list, set, tuple)
    ) else []
