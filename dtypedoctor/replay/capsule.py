"""A capsule: a directory that holds one failing module call, complete enough to be made again anywhere.

``capsule.json`` says how the module and its arguments are made, ``capsule.safetensors`` holds their tensors. Nothing in either is executed as it
is, but for ``source``: the text of classes that live in the user's own files. What else it names is on a list (:mod:`dtypedoctor.replay.allowed`), or runs
only where the user allows it.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from os import fstat
from pathlib import Path
from typing import Any

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import is_real_directory, open_file, parse_json, read_file, reason
from dtypedoctor.replay.allowed import Named, named_in, why_not
from dtypedoctor.tensor_files import Entry, read_entries
from dtypedoctor.text import printable

__all__ = [
    "AGAIN",
    "ALLOW_CODE",
    "CAPSULE",
    "CAPSULE_TENSORS",
    "FORMAT",
    "MODEL",
    "UNLIMITED",
    "CallFix",
    "Capsule",
    "NoCapsule",
    "is_described",
    "read_capsule",
]

CAPSULE, CAPSULE_TENSORS = "capsule.json", "capsule.safetensors"
FORMAT = 1
MODEL = "capsule:"
"""How the name of a scenario's model begins that is the module of a capsule; its directory follows."""
_LARGEST = 16 << 20
"""Bytes of a description; that of a large model takes some megabytes."""
_DAMAGE = (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError)
"""What reading a damaged description raises."""
AGAIN = "Have it sent again; `dtypedoctor exec` leaves another one."
ALLOW_CODE = "Read it first (`source` and `call` in capsule.json, or --script), then pass --allow-code."
"""What the reader of a capsule that runs code can do."""
UNLIMITED = "If you trust whoever made it, pass --allow-code: it replays without a limit of memory, and each run for up to 300 s."
"""What the reader of a capsule can do whose call exceeds its limits."""
_FLOATS = ("float64", "float32", "float16", "bfloat16")
_WEIGHT = 1_000_000
"""By how much an element of a weight counts more than one of an input."""
_NEEDED = {"fqn": str, "class": str, "kind": str, "error": str, "finding": dict, "call": dict, "requires_grad": list, "random": bool,
           "drawn": dict, "cut": list, "data": dict, "classes": list, "source": str}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class NoCapsule:
    """Why there is none, as a clause."""

    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFix:
    """A fix that was tried on the failing call, in the process that kept it.

    Attributes:
        fix: its id.
        outcome: ``fixed`` (the call returns finite values with it, and fails without it), ``not-fixed`` or ``not-tried``.
        reason: how the call fails with it, or why it was not tried; a clause.
    """

    fix: str
    outcome: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capsule:
    """A capsule on disk.

    Attributes:
        directory: where it lies.
        description: what ``capsule.json`` holds.
        bytes: size of both files.
    """

    directory: Path
    description: Mapping[str, Any]
    bytes: int

    @property
    def fqn(self) -> str:
        """Dotted name of the module in the model that it was cut out of."""
        return str(self.description["fqn"])

    @property
    def cls(self) -> str:
        """Name of the module's class."""
        return str(self.description["class"])

    @property
    def operator(self) -> Mapping[str, Any] | None:
        """Of an operator outside of modules ``op``, ``source`` and whether it ran in a ``backward`` pass; None of a module call."""
        found = self.description.get("operator")
        return found if isinstance(found, dict) else None

    @property
    def finding(self) -> Mapping[str, Any]:
        """``id``, ``op``, ``phase``, ``dtype`` and ``summary`` of what was found in the run."""
        found: Mapping[str, Any] = self.description["finding"]
        return found

    @property
    def holds(self) -> str:
        """What is in it, as a sentence."""
        inputs = (
            "synthetic inputs" if self.description["data"].get("synthetic") else "the recorded inputs (training data)"
        )
        weights = "weights"
        if self.description["drawn"]:
            weights += f" ({len(self.description['drawn'])} of them random: --capsule-limit)"
        parts = [weights, inputs]
        if self.description["source"]:
            parts.append(f"source of {', '.join(map(str, self.description['classes'])) or 'functions'}")
        return f"{', '.join(parts[:-1])} and {parts[-1]}"

    @property
    def versions(self) -> Mapping[str, str]:
        """Versions of the libraries whose classes it names, and of torch."""
        found = self.finding.get("versions")
        named = {one.partition(".")[0] for one in self._libraries()} | {"torch"}
        items = found.items() if isinstance(found, dict) else ()
        return {str(name): str(version) for name, version in items if name in named}

    @property
    def fixes(self) -> tuple[CallFix, ...]:
        """The fixes that were tried on the call when it was kept; none where an older version has kept it."""
        found = self.description.get("fixes")
        rows = found if isinstance(found, list) else []
        return tuple(
            CallFix(fix=str(row.get("fix")), outcome=str(row.get("outcome")), reason=str(row.get("reason", "")))
            for row in rows
            if isinstance(row, dict)
        )

    @property
    def dtype(self) -> str:
        """The floating dtype that most elements of its weights have, of its inputs where it has none: ``float16``.

        Raises:
            UsageError: the file with the tensors cannot be read.
        """
        sizes: Counter[str] = Counter()
        for entry in self.tensors():
            if entry.dtype in _FLOATS and ".packed" not in entry.name:
                sizes[entry.dtype] += entry.elements * (_WEIGHT if entry.name.startswith("weight.") else 1)
        return sizes.most_common(1)[0][0] if sizes else "float32"

    def tensors(self) -> list[Entry]:
        """What its file says of the tensors in it.

        Raises:
            UsageError: the file cannot be read, or does not hold what it says.
        """
        entries = read_entries(self.directory / CAPSULE_TENSORS, follow=False, largest=_LARGEST)
        wrong = next((entry for entry in entries if entry.cut or not entry.is_whole), None)
        if wrong is not None:
            where = f"{self.directory / CAPSULE_TENSORS}: {printable(wrong.name[:100])}"
            raise UsageError(f"{where} does not have the size of its shape, or the file is cut short", AGAIN)
        return entries

    @property
    def memory(self) -> int:
        """Bytes that its tensors take, those included that are drawn.

        Raises:
            UsageError: it is damaged.
        """
        try:
            shapes = [list(map(int, how["shape"])) for how in self.description["drawn"].values()]
            if any(len(shape) > 64 or not all(0 <= size < 1 << 62 for size in shape) for shape in shapes):
                raise ValueError("a shape that no tensor has")
        except _DAMAGE as error:
            raise self._damaged(error) from error
        return self.bytes + sum(8 * prod(shape) for shape in shapes)  # drawn in float32, and scaled

    def modules(self) -> tuple[str, ...]:
        """Modules of known libraries that it needs, to be imported in advance."""
        return tuple(sorted(self._libraries())) if not any(self.code()) else ()

    def named(self) -> list[Named]:
        """Everything that it names.

        Raises:
            UsageError: it is damaged.
        """
        try:
            drawn = (Named(role="dtype", name=how["dtype"]) for how in self.description["drawn"].values())
            every = [*named_in(self.description["call"]), *drawn]
            if not all(isinstance(text, str) for named in every for text in (named.name, *named.attributes)):
                raise TypeError("a name that is no text")
            return every
        except _DAMAGE as error:
            raise self._damaged(error) from error

    def code(self) -> Iterator[str]:
        """What it runs that is neither torch's nor a known library's, or is on no list, in words."""
        if self.description["source"]:
            yield f"the source text in {CAPSULE}"
        elif self.description["call"].get("state"):
            yield f"values of variables, without the source text that has them, in {CAPSULE}"
        yield from dict.fromkeys(filter(None, map(why_not, self.named())))

    def _damaged(self, error: Exception) -> UsageError:
        why = printable(f"{type(error).__name__}: {error}"[:200])
        return UsageError(f"{self.directory / CAPSULE}: damaged: {why}", AGAIN)

    def _libraries(self) -> set[str]:
        """The modules whose classes and functions it names."""
        return {named.name.partition(":")[0] for named in self.named() if ":" in named.name} - {"source"}


def is_described(description: Mapping[str, Any], but: str = "") -> bool:
    """Whether each part of a description is there, and of its kind, except for one that is added later."""
    fixes = description.get("fixes", [])
    parts = {key: description.get(key) for key in _NEEDED if key != but}
    return all(isinstance(part, _NEEDED[key]) for key, part in parts.items()) and (
        isinstance(fixes, list) and all(isinstance(row, dict) and isinstance(row.get("fix"), str) for row in fixes)
    )


def read_capsule(directory: Path) -> Capsule:
    """The capsule in ``directory``, or in ``directory/capsule``.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    place = directory / "capsule" if is_real_directory(directory / "capsule") else directory
    hint = "Give the directory `capsule` that `dtypedoctor exec` leaves in a run directory."
    try:
        description = parse_json(read_file(place / CAPSULE, _LARGEST))
        with open_file(place / CAPSULE_TENSORS) as file:
            size = (place / CAPSULE).stat().st_size + fstat(file.fileno()).st_size
    except (OSError, ValueError) as error:
        raise UsageError(f"{place}: no capsule that can be read: {reason(error)}", hint) from error
    if not isinstance(description, dict):
        raise UsageError(f"{place / CAPSULE}: not a capsule", hint)
    if description.get("capsule") != FORMAT:
        raise UsageError(
            f"{place / CAPSULE}: capsule format {printable(repr(description.get('capsule'))[:40])}, this version reads {FORMAT}",
            "Use the version of dtypedoctor that wrote it.",
        )
    if not is_described(description):
        raise UsageError(f"{place / CAPSULE}: a part of it is missing or damaged", hint)
    return Capsule(directory=place, description=description, bytes=size)
