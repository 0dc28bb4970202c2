"""From what is typed at the prompt to a Scenario: finds the file, reads it, applies options; or makes one for a model.

PyYAML composes a file with the place of each key and value, pydantic checks it; mistakes are reported all at once, each with its place.
Anchors, aliases, tags and merge keys are rejected: a scenario is plain keys and values. Unquoted words are read by the core
schema of YAML 1.2.2 (https://yaml.org/spec/1.2.2/#103-core-schema); PyYAML follows YAML 1.1, where ``1e-3`` is text, ``yes``
is true, ``010`` is eight and ``2026-04-01`` is a date.
"""

import math
import os
import re
import stat
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from yaml.reader import ReaderError

from dtypedoctor import plugins
from dtypedoctor.errors import UsageError
from dtypedoctor.lab.scenarios.model import Model, Scenario, Strict
from dtypedoctor.plugins import BUILTIN, switched_off
from dtypedoctor.text import QUOTE_LIMIT, did_you_mean, printable, quoted

PATTERNS: dict[str, re.Pattern[str]] = {
    "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    "int": re.compile(r"[-+]?[0-9]+\Z"),
    "float": re.compile(
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
}
"""What an unquoted word must look like to be of each kind, in the order in which they are tried."""

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
_DEEPEST = 32
"""Levels of nesting: a scenario needs 6; `options` may nest further."""
_MOST_SHOWN = 100

KeyPath = tuple[str | int, ...]
"""Keys and list indices from the top of a file down to a value."""
Mistake = tuple[int, int, str]
"""Line and column, both from 1, and what is wrong there, on one line."""


class _Loader(yaml.SafeLoader):
    """Resolves words by the core schema, follows no alias, and goes no deeper than a scenario needs."""

    yaml_implicit_resolvers = {  # noqa: RUF012  (PyYAML's own name)
        None: [(f"tag:yaml.org,2002:{kind}", pattern) for kind, pattern in PATTERNS.items()]
    }
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Compose one node; see PyYAML.

        Raises:
            MarkedYAMLError: at what a scenario may not hold.
        """
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None or event.tag is not None:
            raise yaml.MarkedYAMLError(
                problem="aliases, anchors and tags are not accepted", problem_mark=event.start_mark
            )
        if self.depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {_DEEPEST} levels", problem_mark=event.start_mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _Content:
    """The plain values of a file, the place of each key and list item by its path, and what was wrong with them already."""

    def __init__(self, node: yaml.Node) -> None:
        self.places: dict[KeyPath, tuple[int, int]] = {}
        self.mistakes: list[Mistake] = []
        self.values = self._plain(node, ())

    def at(self, path: KeyPath) -> Any:
        """Look up the value at ``path``; None where there is none."""
        value = self.values
        for part in path:
            inside = part in value if isinstance(value, dict) else isinstance(value, list) and part in range(len(value))
            if not inside:
                return None
            value = value[part]
        return value

    def mistake(self, path: KeyPath, text: str) -> Mistake:
        """Say something of what is at ``path``, at its place or that of what is around it."""
        place = next(self.places[path[:end]] for end in range(len(path), -1, -1) if path[:end] in self.places)
        return (*place, f"{dotted(path)}: {text}" if path else text)

    def _plain(self, node: yaml.Node, path: KeyPath) -> Any:
        self.places.setdefault(path, _place(node.start_mark))
        if isinstance(node, yaml.SequenceNode):
            return [self._plain(item, (*path, number)) for number, item in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode):
            return dict(self._pairs(node, path))
        try:
            return _read_scalar(node)
        except ValueError as error:
            self.mistakes.append(self.mistake(path, str(error)))
            return None

    def _pairs(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, Any]]:
        for key, value in node.value:
            place, word = _place(key.start_mark), key.value
            if not isinstance(word, str) or not word.isprintable() or word in ("", "<<"):
                self.mistakes.append((*place, f"{dotted(path)}: a key must be a word".removeprefix(": ")))
            elif (*path, word) in self.places:
                first = ":".join(map(str, self.places[*path, word]))
                self.mistakes.append((*place, f"{dotted((*path, word))}: duplicate key, first given at {first}"))
            else:
                self.places[*path, word] = place
                yield word, self._plain(value, (*path, word))


def read_scenario(
    data: bytes, stem: str, known: Mapping[str, Collection[str]]
) -> tuple[Scenario | None, list[Mistake]]:
    """Read the one document of a file.

    Args:
        data: the content of the file.
        stem: its name without the ending, which must be the scenario's name.
        known: all ids by what they name: ``finding``, ``remedy``, ``correction``. What is left out is checked for its form only.

    Returns:
        The scenario, or None where it is none, and every mistake that was found.
    """
    try:
        node = yaml.compose(data, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        return None, [_syntax_mistake(error)]
    except ReaderError as error:
        line = 1 + data[: error.position].count(b"\n")
        return None, [(line, 1, f"not text in UTF-8 that YAML allows: {printable(error.reason)}")]
    except (ValueError, OverflowError):  # PyYAML leaves escapes beyond Unicode and huge version numbers to Python
        return None, [(1, 1, "not valid YAML: a number here is too large")]
    if node is None or (isinstance(node, yaml.ScalarNode) and not node.value):
        return None, [(1, 1, "the file is empty")]
    content = _Content(node)
    mistakes = [*content.mistakes, *_about_name(content, stem), *_about_ids(content, known)]
    try:
        return Scenario.model_validate(content.values), mistakes
    except ValidationError as refused:
        told = {mistake[:2] for mistake in mistakes}
        described = (_described(content, error) for error in refused.errors(include_url=False))
        return None, mistakes + [mistake for mistake in described if mistake[:2] not in told]


def _described(content: _Content, error: ErrorDetails) -> Mistake:
    """Give an error of pydantic its place; the kind of a workload, by which pydantic tells them apart, is no key in the file."""
    path: KeyPath = ()
    for part in error["loc"]:
        if (*path, part) in content.places:
            path = (*path, part)
    if error["type"] == "missing":
        path = (*path, error["loc"][-1])
    if error["type"] != "extra_forbidden":
        return content.mistake(path, in_words(error))
    keys = {name for part in _parts(Strict) for name in part.model_fields}
    key = str(path[-1])
    return content.mistake(path, f"unknown key{did_you_mean(key, keys) if key not in keys else ' here'}")


def _parts(part: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for below in part.__subclasses__():
        yield below
        yield from _parts(below)


def _about_name(content: _Content, stem: str) -> Iterator[Mistake]:
    """Compare the scenario's name with that of its file: a copy must be renamed inside, too."""
    name = content.at(("name",))
    if isinstance(name, str) and name != stem:
        yield content.mistake(("name",), f"must be {quoted(stem)}, the file's name, got {quoted(name)}")


_ID_LISTS: tuple[tuple[str, KeyPath], ...] = (
    ("finding", ("expect", "findings")),
    ("remedy", ("expect", "cured_by")),
    ("remedy", ("expect", "not_cured_by")),
    ("remedy", ("remedies",)),
    ("correction", ("corrections",)),
)
"""Lists of ids in a scenario, or of mappings with one, with what they name."""


def _about_ids(content: _Content, known: Mapping[str, Collection[str]]) -> Iterator[Mistake]:
    """Look for ids that nothing in the program has."""
    for what, path in _ID_LISTS:
        values, ids = content.at(path), known.get(what)
        for number, value in enumerate(values if isinstance(values, list) and ids is not None else ()):
            at: KeyPath = (*path, number)
            if isinstance(value, dict):
                at, value = (*at, "id"), value.get("id")
            if isinstance(value, str) and ids is not None and value not in ids:
                yield content.mistake(at, f"no {what} has the id {quoted(value)}{did_you_mean(value, ids)}")


def _syntax_mistake(error: yaml.MarkedYAMLError) -> Mistake:
    """Say where reading ended and why, in PyYAML's words."""
    mark, start = error.problem_mark, error.context_mark
    why = printable(str(error.problem)[:200].replace(r"'\x00'", "the end of the file"))
    if error.context and start is not None and mark is not None and start.line < mark.line:
        why += f" ({error.context} that starts at line {start.line + 1})"
    return (*(_place(mark) if mark else (1, 1)), f"not valid YAML: {why}")


def _place(mark: Any) -> tuple[int, int]:
    return mark.line + 1, mark.column + 1


def _read_scalar(node: yaml.Node) -> str | int | float | bool | None:
    """Read a word.

    Raises:
        ValueError: it holds a character that no file name, id or message can hold, or is a number that is too large.
    """
    word: str = node.value
    if match := _CONTROL.search(word):
        raise ValueError(f"the text holds the character U+{ord(match[0]):04X}, which is not accepted")
    match node.tag.rpartition(":")[2]:
        case "null":
            return None
        case "bool":
            return word.lower() == "true"
        case "int" if len(word) <= 19:
            return int(word)
        case "int" | "float":
            if word[-1].isalpha():  # `.inf` and `.nan`
                raise ValueError("inf and NaN are not accepted")
            number = float(word)
            if not math.isfinite(number) or node.tag.endswith("int"):
                raise ValueError("this number is too large")
            return number
        case _:
            return word


def dotted(path: KeyPath) -> str:
    """Write a path as a person does: ``("steps", 0, "model")`` is ``steps[0].model``; empty for the whole file."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            shown = part if part.isidentifier() and len(part) <= QUOTE_LIMIT else quoted(part)
            text += f".{shown}" if text else shown
    return text


def refusal(path: Path, mistakes: Iterable[Mistake], hint: str) -> UsageError:
    """Make one error of all mistakes, one ``file:line:column: text`` a line in the order of the file, the first hundred of them."""
    ordered = sorted(set(mistakes))
    lines = [f"{printable(path)}:{line}:{column}: {text}" for line, column, text in ordered[:_MOST_SHOWN]]
    if len(ordered) > _MOST_SHOWN:
        lines.append(f"{printable(path)}: and {len(ordered) - _MOST_SHOWN} more mistakes")
    return UsageError("\n".join(lines), hint)


_OTHER_WORDS = {
    "gpu": "cuda", "nvidia": "cuda",
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16",
    "float": "float32", "fp32": "float32", "f32": "float32", "double": "float64", "fp64": "float64", "f64": "float64",
}  # fmt: skip


def in_words(error: ErrorDetails) -> str:
    """Give pydantic's sentence, what was given instead, and the choice that may be meant."""
    given, context = error["input"], error.get("ctx", {})
    sentence = re.sub(r" or (instance of \w+|object to extract fields from)|^Value error, ", "", error["msg"])
    if error["type"] not in ("missing", "value_error", "union_tag_invalid", "union_tag_not_found"):
        shown = quoted(given) if isinstance(given, str) else repr(given) if isinstance(given, (int, float)) else ""
        sentence += f", got {shown}" if shown else ""
    choices = re.findall(r"'([^']*)'", context.get("expected_tags", context.get("expected", "")))
    word = str(context.get("tag", given))
    return sentence + did_you_mean(_OTHER_WORDS.get(word.lower(), word), choices)


_PACKAGE = Path(__file__).resolve().parents[2]


def available() -> tuple[Path, ...]:
    """The files of all shipped scenarios, sorted by name.

    A wheel holds them inside the package. An editable install and a source checkout have them beside the package.
    """
    found: dict[str, Path] = {}
    for directory in _directories(_PACKAGE):
        for path in directory.glob("*.yaml"):
            found.setdefault(path.stem, path)
    return tuple(found[name] for name in sorted(found))


def shipped_beside(text: str) -> Path | None:
    """The folder of further shipped scenarios, or the file in it, meant by ``scenarios/real`` or ``real/NAME.yaml``; None if there is none."""
    name = text.removeprefix("scenarios/").rstrip("/")
    if not re.fullmatch(r"[a-z]+(/[a-z0-9_]+\.yaml)?", name):
        return None
    found = (directory / name for directory in _directories(_PACKAGE))
    return next((path for path in found if path.is_file() or any(path.glob("*.yaml"))), None)


def is_shipped(path: Path) -> bool:
    """Whether a file came with this package."""
    shipped = [*available(), *(one for top in _directories(_PACKAGE) for one in top.glob("*/*.yaml"))]
    return path.resolve() in {one.resolve() for one in shipped}


def resolve(text: str) -> Path:
    """The file that a person means: a path, or the bare name of a shipped scenario (``gemma4_grpo_fp16``).

    Raises:
        UsageError: there is neither such a file nor such a scenario.
    """
    path = Path(text)
    shipped = {scenario.stem: scenario for scenario in available()}
    if text in shipped and not _is_file(path):
        return shipped[text]
    if not text or not _exists(path):
        raise not_found(text)
    return path


def not_found(text: str) -> UsageError:
    """The error for a scenario that does not exist, naming the one that may be meant."""
    names = [path.stem for path in available()]
    suggestion = did_you_mean(Path(text).stem, names)
    what = printable(Path(text)) if text else quoted(text)
    return UsageError(
        f"{what}: no such file or scenario{suggestion}", f"Known scenarios: {', '.join(names)}" if names else ""
    )


def _directories(package: Path) -> list[Path]:
    directories = [package / "data" / "scenarios"]
    if (package.parent / "pyproject.toml").is_file():  # in site-packages, `scenarios` would be somebody else's
        directories.append(package.parent / "scenarios")
    return directories


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, a directory that may not be entered, a NUL
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return True  # opening it says what is wrong with it


LARGEST_FILE = 128 * 1024
"""Bytes. A scenario takes one or two thousand, and PyYAML about ten seconds for a million."""


def read_bytes(path: Path) -> bytes:
    """Read a regular file of moderate size.

    Raises:
        FileNotFoundError: there is no such file.
        UsageError: it is no file, cannot be opened, or is too large.
    """
    try:
        if path.is_dir():
            names = sorted(printable(one) for one in path.glob("*.yaml"))
            hint = f"Give one of its files: {', '.join(names[:5])}" if names else "Give a YAML file."
            raise UsageError(f"{printable(path)}: this is a directory, not a scenario file", hint)
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError(f"{printable(path)}: this is not a regular file", "Give a YAML file.")
        with path.open("rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise UsageError(
            f"{printable(path)}: cannot be read: {reason}", "Check the path and its permissions."
        ) from error
    if len(data) > LARGEST_FILE:
        raise UsageError(f"{printable(path)}: larger than {LARGEST_FILE // 1024} KiB", "Is this a scenario file?")
    return data


_HINT = "docs/scenario-keys.md lists every key."


def load_scenario(path: Path, known: Mapping[str, Collection[str]] | None = None) -> Scenario:
    """Reads a scenario.

    Args:
        path: the file; its name without the ending is the scenario's name.
        known: ids that exist, by what they name (``finding``, ``remedy``, ``correction``); ids of the scenario that are
            not among them are mistakes. What is left out is checked for its form only.

    Raises:
        UsageError: the file cannot be read, or holds mistakes: one ``file:line:column: what is wrong`` a line, in the
            order of the file.
    """
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        raise not_found(str(path)) from None
    scenario, problems = read_scenario(data, path.stem, known or {})
    if problems or scenario is None:
        raise refusal(path, problems, f"{_HINT}{switched_off()}")
    # Scripts and folders of models that are not found from the working directory are those in the scenario's own
    folder = path.resolve().parent
    steps = scenario.model_dump()["steps"]
    for step in steps:
        if step["workload"]["kind"] == "script" and step["workload"]["path"] is not None:
            step["workload"]["path"] = _beside(step["workload"]["path"], folder)
        if step["model"] is not None and ":" not in step["model"]["name"]:
            step["model"]["name"] = _beside(step["model"]["name"], folder, "config.json")
    return scenario.with_changes(steps=steps)


def _beside(name: str, folder: Path, file: str = "") -> str:
    """The path from ``folder`` where there is such a file, or a folder with ``file``, and none in the working directory; else ``name``."""
    found = not _exists(Path(name)) and _is_file(folder / name / file if file else folder / name)
    return str(folder / name) if found else name


SETTINGS: dict[str, dict[str, Any]] = {
    "forward": {"kind": "forward"},
    "train": {"kind": "train", "steps": 4},
    "sft": {"kind": "sft", "steps": 4},
    "grpo": {"kind": "grpo", "steps": 4, "gradient_accumulation": 2},
    "generate": {"kind": "generate"},
}
"""Settings of a workload of which only the name was given; a shipped scenario that does the same keeps its own."""

_ONE_PASS = {"kind": "forward", "backward": True}
"""What is done where no workload was named."""


def case_of(model: str, dtype: str, workload: str | None = None) -> Scenario:
    """A scenario for ``model`` in ``dtype``.

    Without a workload it does what the shipped scenario of a builtin model does, and one forward and backward pass on random
    tokens with any other model. Nothing is expected of it.

    Raises:
        UsageError: the dtype or the workload is not one that a scenario could name.
    """
    if workload is not None and workload not in SETTINGS:
        meant = did_you_mean(workload, SETTINGS)
        raise UsageError(f"--workload: there is no workload {workload!r}{meant}", f"Known: {', '.join(SETTINGS)}.")
    # The shipped scenario that shows what a builtin model is there for. Its random weights alone are too small to fail, so the outliers and adapters of the
    # scenario are taken with it
    builtin = plugins.registered(plugins.Model).get(model.removeprefix(BUILTIN)) if model.startswith(BUILTIN) else None
    shown_by = builtin.case if builtin is not None else None
    shipped = load_scenario(resolve(shown_by)) if shown_by is not None else None
    step: dict[str, Any] = {"model": {"name": model, "dtype": dtype}, "workload": _ONE_PASS}
    if shipped is not None:
        step = shipped.model_dump()["steps"][0]
        step["model"]["dtype"] = dtype
    if workload is not None:
        own = step["workload"] if shipped is not None and step["workload"]["kind"] == workload else None
        step["workload"] = own or SETTINGS[workload]
    words = re.sub(r"[^a-z0-9_.-]+", "-", Path(model).name.lower() if ":" not in model else model.lower())
    values: dict[str, Any] = {
        "name": (words.strip("-_.")[:100] or "model"),
        "summary": f"{model} in {dtype}.",
        "steps": [step],
    }
    if shipped is not None:
        values |= {"references": shipped.references, "seed": shipped.seed}
    try:
        return Scenario.model_validate(values)
    except ValidationError as refused:
        error = refused.errors(include_url=False)[0]
        raise UsageError(f"--{error['loc'][-1]}: {in_words(error)}") from refused


def override(
    scenario: Scenario,
    *,
    model: str | None = None,
    dtype: str | None = None,
    device: str | None = None,
    seed: int | None = None,
    processes: int | None = None,
    device_map: str | None = None,
) -> Scenario:
    """The scenario with other values where one is given; ``model``, ``dtype`` and ``device_map`` go to every model in it.

    Outliers and options belong to the builtin model for which they were written, so another model is taken without them.

    Raises:
        UsageError: a value is not one that the scenario's file could hold.
    """
    given = {"device": device, "seed": seed}
    changes: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if processes is not None:
        changes["distributed"] = (scenario.distributed.model_dump() if scenario.distributed is not None else {}) | {
            "processes": processes
        }
    changes["steps"] = [
        step.model_dump() | ({"model": _changed(step.model, model, dtype, device_map)} if step.model else {})
        for step in scenario.steps
    ]
    try:
        return scenario.with_changes(**changes)
    except ValidationError as refused:
        error = refused.errors(include_url=False)[0]
        option = str(error["loc"][-1]).replace("_", "-") if error["loc"] else "nproc-per-node"
        raise UsageError(f"--{option}: {in_words(error)}") from refused


def _changed(model: Model, name: str | None, dtype: str | None, device_map: str | None) -> dict[str, Any]:
    values = model.model_dump()
    if name is not None and name != model.name:
        values |= {"name": name, "outliers": [], "options": {}}
    values |= {key: value for key, value in {"dtype": dtype, "device_map": device_map}.items() if value is not None}
    return values


def json_schema() -> dict[str, Any]:
    """The schema in draft 2020-12, with each key's description and default.

    It accepts every file that ``load_scenario`` accepts. It cannot say what depends on several keys (a script has either
    ``path`` or ``module``; the name is the file's), so the loader has the last word.
    """
    schema = Scenario.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:dtypedoctor:schema:scenario:1",
        **schema,
        "title": "dtypedoctor scenario",
    }


def require_builtin(name: str) -> None:
    """Refuse the name of a builtin model that nobody has registered, or that lacks its prefix.

    Raises:
        UsageError: there is none of that name.
    """
    short, models = name.removeprefix(BUILTIN), plugins.registered(plugins.Model)
    if name in models and not os.path.exists(name):
        raise UsageError(f"cannot load the model {name!r}; did you mean '{BUILTIN}{name}'?")
    if name != short and short not in models:
        meant = did_you_mean(short, models)
        raise UsageError(f"there is no builtin model {short!r}{meant}", plugins.known(plugins.Model, BUILTIN))
