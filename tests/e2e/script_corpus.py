"""The corpus of miniature scripts: what each one is, and what it does when run as it stands.

Every script in ``scripts/`` opens with YAML in comments::

    # expect: {id: float16-overflow, family: nonfinite, raises: RuntimeError}
    # at: {fqn: blocks.1.ff, op: aten.mul.Tensor, phase: forward, step: 3}
    # why: one sentence

``id`` is the first finding, null where nothing is wrong, and ``raises`` the exception that ends the script, or null. ``fqn`` is the
module that originates it, relative to the root ("" is the root, null outside of all modules), ``op`` the operator that made the first
non-finite value, or that raised, and ``step`` the optimizer steps done plus one (without optimizer steps, the number of the outermost call).

For dtype mismatches also ``born`` (what gave the odd operand its dtype), ``born_fqn`` (where) and ``raised_in`` (the
module whose forward raised; ``fqn`` names the one to blame). ``shows`` is a regular expression that the script's own
output must match: the visible symptom of a failure that raises nothing. A list in ``id``, ``fqn``, ``op``, ``phase``
or ``born`` means any one of these. A key that is left out is not expected to have a certain value. How sure
and how grave a finding is stands in `snapshot.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "scripts"

FAMILIES = ("mismatch", "scaling", "nonfinite", "silent", "compile-load", "healthy")

BORN = (
    "norm",
    "buffer",
    "embedding",
    "autocast-list",
    "inplace",
    "custom-fwd",
    "quant-state",
    "compute-dtype",
    "adapter",
    "modules-to-save",
    "keep-in-fp32",
    "cache",
    "model-input",
    "load-dtype",
    "fsdp-output",
)
"""What can have given the odd operand of a mismatch its dtype."""

REQUIRED = {"id", "raises", "family", "why"}
KEYS = REQUIRED | {"fqn", "op", "phase", "step", "born", "born_fqn", "raised_in", "shows"}

Choice = tuple[str | None, ...] | None
"""Accepted values; None where anything is accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One script and its header. ``source`` is the program without the header; ``None`` choices accept anything."""

    path: Path
    source: str
    family: str
    why: str
    ids: tuple[str, ...]
    fqns: Choice
    ops: Choice
    phases: Choice
    step: int | None
    raises: str | None
    born: Choice
    born_fqn: str | None
    raised_in: str | None
    shows: str | None

    @property
    def name(self) -> str:
        """File name without extension, unique in the corpus."""
        return self.path.stem

    @property
    def healthy(self) -> bool:
        """Whether nothing must be found."""
        return not self.ids

    @property
    def imports(self) -> frozenset[str]:
        """Heavy libraries that the script names."""
        libraries = ("transformers", "peft", "trl", "bitsandbytes", "accelerate")
        return frozenset(library for library in libraries if library in self.source)


@cache
def cases() -> tuple[Case, ...]:
    """All scripts, by name. Raises ValueError, with the file, for a header that cannot be read."""
    return tuple(read_case(path) for path in sorted(FOLDER.glob("*.py")))


def read_case(path: Path) -> Case:
    """The case in one file. Raises ValueError, with the file, for a header that cannot be read."""
    lines = path.read_text(encoding="utf-8").splitlines()
    length = next((number for number, line in enumerate(lines) if not line.startswith("#")), len(lines))
    try:
        header = yaml.safe_load("\n".join(line[2:] for line in lines[:length]))
        header = header.pop("expect") | header.pop("at", {}) | header
    except (yaml.YAMLError, AttributeError, TypeError, KeyError) as error:
        raise ValueError(f"{path}: no readable `expect` at the top: {error}") from error
    check_header(path, header)
    return Case(
        path=path,
        source="\n".join(lines[length:]),
        family=header["family"],
        why=header["why"],
        ids=tuple(one for one in as_tuple(header["id"]) if one is not None),
        fqns=choice(header, "fqn"),
        ops=choice(header, "op"),
        phases=choice(header, "phase"),
        step=header.get("step"),
        raises=header["raises"],
        born=choice(header, "born"),
        born_fqn=header.get("born_fqn"),
        raised_in=header.get("raised_in"),
        shows=header.get("shows"),
    )


def check_header(path: Path, header: Mapping[str, Any]) -> None:
    """Raises ValueError where a key is unknown or missing, or a value is outside its vocabulary."""
    if unknown := set(header) - KEYS:
        raise ValueError(f"{path}: unknown keys {sorted(unknown)}")
    if missing := REQUIRED - set(header):
        raise ValueError(f"{path}: missing keys {sorted(missing)}")
    if header["family"] not in FAMILIES or (header["family"] == "healthy") != (header["id"] is None):
        raise ValueError(f"{path}: family {header['family']!r} does not go with id {header['id']!r}")
    if strange := set(as_tuple(header.get("born"))) - {None, *BORN}:
        raise ValueError(f"{path}: unknown origins {sorted(map(str, strange))}")


def choice(header: Mapping[str, Any], key: str) -> Choice:
    """Accepted values of ``key``, None where the header does not name it."""
    return as_tuple(header[key]) if key in header else None


def as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, list) else (value,)


def matches_fqn(actual: str | None, accepted: Choice) -> bool:
    """Whether ``actual`` is one of ``accepted``, or ends with one of them at a dot (a wrapper may sit above the root)."""
    if accepted is None or actual in accepted:
        return True
    if actual is None:
        return False
    return any(one and actual.endswith(f".{one}") for one in accepted)
