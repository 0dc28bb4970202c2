"""A stand-alone script that shows the failure of one module, made from what the worker kept of it, and run to make sure.

The script needs torch, not this package. Whatever was captured is text of somebody else's. In the script it is data: a literal
as ``repr`` writes it, or a comment.
"""

import contextlib
import keyword
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import parse_json, read_file
from dtypedoctor.redaction.redact import redact
from dtypedoctor.redaction.secrets import SECRET, names_a_secret
from dtypedoctor.scenario.model import Capture, Request
from dtypedoctor.scenario.problems import printable
from dtypedoctor.trials.bisection.measurements import ReferenceSetup
from dtypedoctor.trials.bisection.probe_runner import ProbeRunner
from dtypedoctor.trials.bisection.results import OWN, Kind, Reproduction, Symptom
from dtypedoctor.trials.bisection.script_template import TEMPLATE
from dtypedoctor.trials.bisection.symptoms import symptom_of

__all__ = ["SCRIPT", "CannotBeWrittenError", "Claim", "reproduce", "run_clean", "script_text"]


SCRIPT, TENSORS = "repro.py", "repro.safetensors"
_CAPTURED = ("capture.json", "capture.safetensors")
"""What the worker calls them."""

_LARGEST = 256 << 20
"""Bytes of a description; that of a whole model takes some megabytes."""

TIME_LIMIT = 300.0
"""Seconds for the script: it imports the module's library."""

MOST_TRIED = 3
"""Culprits for which a script is tried; after them what holds them all."""

WRONG = 1e-2
"""Relative error from which on a module by itself is called inaccurate; float16 and bfloat16 round to less."""

_FAILS = "FAILS"
_LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes")

_LINE = 100
"""Characters of a dictionary that stands in one line."""

_KINDS = frozenset({
    "value", "float", "tensor", "dtype", "device", "tuple", "list", "dict", "pairs", "function", "mapping", "config", "object", "opaque",
})  # fmt: skip
"""The forms of a described value."""

_PLAIN = {
    "float": "float({!r})",
    "tensor": "T[{!r}]",
    "dtype": "dtype({!r})",
    "device": "torch.device({!r})",
    "function": "found({!r})",
}
"""Expressions for those that are made from one string."""


class CannotBeWrittenError(Exception):
    """A captured value has no form that a script could make again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What the script is to show.

    Attributes:
        title: one line.
        about: what was found, sentence by sentence.
        check: ``forward`` (something that leaves the module is not finite), ``backward`` (a gradient that leaves it is not),
            ``dtype`` (it raises) or ``accuracy``.
        limit: for ``accuracy``, the relative error that it exceeds.
        made_with: versions of the libraries.
    """

    title: str
    about: tuple[str, ...]
    check: str
    limit: float
    made_with: str


def script_text(capture: Mapping[str, Any], claim: Claim, *, configs: bool) -> str:
    """The script.

    Args:
        capture: the description that the worker has written; see ``instrument/capture.py`` for its form.
        claim: what it is to show.
        configs: also give the module its configuration objects, which most forwards do not need.

    Raises:
        CannotBeWrittenError: an argument of the call cannot be made by a script.
    """
    writer = _Writer(configs=configs)
    calls = [f"    ({name!r}, lambda T: {writer.value(result)})," for name, result in capture["calls"]]
    gradients = [
        f"    {(place, int(index))}: {key!r},"
        for place, leaving in enumerate(capture["leaving"])
        for index, key in leaving["gradients"].items()
    ]
    keywords = "".join(f", {_keyword(name, writer.value(value))}" for name, value in capture["kwargs"].items())
    positional = ", ".join(writer.value(value) for value in capture["args"])
    return TEMPLATE.format(
        about=_comment((claim.title, *claim.about, f"Made with {claim.made_with}.")),
        check=claim.check,
        limit=float(claim.limit),
        grad=bool(capture["grad"] or claim.check == "backward"),
        autocast=[tuple(region) for region in capture["autocast"]],
        calls="\n".join(calls),
        gradients="\n".join(gradients),
        module=_indented(writer.module(capture["recipe"]), 4),
        arguments=f"{positional}{keywords}".removeprefix(", "),
    )


def _comment(texts: Iterable[str]) -> str:
    """Texts as comments, redacted, each of their lines behind a ``#`` and with nothing in it that would end the line."""
    lines = [line for text in texts for line in redact(text).split("\n")]
    return "\n".join(f"# {printable(line)}".rstrip() for line in lines)


def _keyword(name: str, value: str) -> str:
    """A keyword argument of a call; a name that no source text can have goes through a dictionary."""
    plain = name.isascii() and name.isidentifier() and not keyword.iskeyword(name)
    return f"{name}={value}" if plain else f"**{{{name!r}: {value}}}"


class _Writer:
    """Writes expressions.

    Args:
        configs: whether modules get their configuration objects.
    """

    def __init__(self, *, configs: bool) -> None:
        self._configs = configs

    def value(self, described: Mapping[str, Any]) -> str:
        """A Python expression for a described value; ``T`` holds the tensors."""
        ((kind, content),) = [(k, v) for k, v in described.items() if k in _KINDS]
        if kind == "value":
            return repr(redact(content) if isinstance(content, str) else content)
        if kind in _PLAIN:
            return _PLAIN[kind].format(content)
        if kind in ("tuple", "list", "dict", "pairs"):
            return self._holding(kind, content)
        return self._imported(kind, described)

    def _holding(self, kind: str, content: Any) -> str:
        """A container as an expression."""
        if kind == "tuple":
            return f"({''.join(self.value(item) + ', ' for item in content).rstrip()})" if content else "()"
        if kind == "list":
            return f"[{', '.join(self.value(item) for item in content)}]"
        if kind == "dict":
            return self._mapping(content)
        return "{" + ", ".join(f"{self.value(name)}: {self.value(item)}" for name, item in content) + "}"

    def module(self, recipe: Mapping[str, Any]) -> str:
        """A Python expression that makes a module."""
        lines = [f"made({recipe['class']!r},"]
        lines.append(f"    attributes={_dictionary(self._attributes(recipe))},")
        for kind in ("parameters", "buffers"):
            held = {name: _held(kept) for name, kept in recipe[kind].items()}
            if held:
                lines.append(f"    {kind}={_dictionary(held)},")
        if recipe["children"]:
            lines.append("    children={")
            for name, child in recipe["children"].items():
                made = self.module(child) if child is not None else "Recorded()"
                lines.append(f"        {name!r}: {_indented(made, 8)},")
            lines.append("    },")
        if "forward" in recipe:
            lines.append(f"    forward={recipe['forward']!r},")
        return "\n".join(lines) + "\n)"

    def _attributes(self, recipe: Mapping[str, Any]) -> dict[str, str]:
        """Attributes as expressions; what no script can make is left out, and missed only if the forward reads it."""
        found = {}
        for name, described in recipe["attributes"].items():
            if self._configs or "config" not in described:
                with contextlib.suppress(CannotBeWrittenError):
                    found[name] = self._named(name, described)
        return found

    def _mapping(self, content: Mapping[str, Any]) -> str:
        return "{" + ", ".join(f"{name!r}: {self._named(name, item)}" for name, item in content.items()) + "}"

    def _named(self, name: str, described: Mapping[str, Any]) -> str:
        """A value by its name, which may say that it is secret."""
        secret = names_a_secret(name) and isinstance(described.get("value"), str)
        return repr(SECRET) if secret else self.value(described)

    def _imported(self, kind: str, described: Mapping[str, Any]) -> str:
        if kind == "mapping":
            return f"found({described['mapping']!r})(**{self._mapping(described['values'])})"
        if kind == "object":
            return f"holding({described['object']!r}, {self.value(described['values'])})"
        if kind == "config":
            values = self.value(described["values"])
            return f"configured({described['config']!r}, {values}, {self._mapping(described['chosen'])})"
        raise CannotBeWrittenError(f"a {described[kind]} cannot be carried into a script")


def _held(kept: str | Mapping[str, Any] | None) -> str:
    """A parameter or buffer as an expression."""
    if kept is None or isinstance(kept, str):
        return "None" if kept is None else f"T[{kept!r}]"
    state = ", ".join(f"{name!r}: T[{key!r}]" for name, key in kept["state"].items())
    return f"packed(T[{kept['packed']!r}], {{{state}}})"


def _dictionary(expressions: Mapping[str, str]) -> str:
    """A dictionary of expressions, one a line where it is long."""
    flat = "{" + ", ".join(f"{name!r}: {text}" for name, text in expressions.items()) + "}"
    if len(flat) <= _LINE:
        return flat
    return "{\n" + "".join(f"        {name!r}: {text},\n" for name, text in expressions.items()) + "    }"


def _indented(text: str, spaces: int) -> str:
    return text.replace("\n", "\n" + " " * spaces)


def reproduce(runner: ProbeRunner, setup: ReferenceSetup, culprits: Sequence[str]) -> Reproduction:
    """Writes ``repro.py`` and ``repro.safetensors`` into the run directory for the first culprit that fails by itself.

    The script is run once in a fresh interpreter and kept only if it fails as it says.
    """
    untreated = runner.run(Request(scenario=setup.workload.scenario))
    failure = symptom_of(untreated, setup.tolerance)
    if failure.phase == "optimizer" or failure.call is None:
        return Reproduction(module=culprits[0], reason="it fails outside of the modules' own calls")
    order = [*sorted(culprits, key=lambda culprit: culprit != failure.fqn)[:MOST_TRIED], *_around(culprits)]
    versions = untreated.trace.environment.get("versions", {})
    tried: list[Reproduction] = []
    for culprit in order:
        tried.append(_attempt(runner, setup, culprit, failure, _made_with(versions)))
        if tried[-1].script:  # another attempt would write over its files
            return tried[-1]
    return tried[0]


def _around(culprits: Sequence[str]) -> tuple[str, ...]:
    """The smallest module that holds several culprits, which may fail only together; none where that is the whole model."""
    if len(culprits) < 2:
        return ()
    paths = [culprit.removesuffix(OWN).split(".") for culprit in culprits]
    common = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))]
    return (".".join(common),) if common and common != [""] else ()


def _attempt(
    runner: ProbeRunner, setup: ReferenceSetup, culprit: str, failure: Symptom, made_with: str
) -> Reproduction:
    assert failure.call is not None  # the caller has looked
    wanted = Capture(module=culprit.removesuffix(OWN), own=culprit.endswith(OWN), call=failure.call)
    try:
        captured = runner.run(Request(scenario=setup.workload.scenario, capture=wanted)).directory
        description = parse_json(read_file(captured / _CAPTURED[0], _LARGEST))
    except UsageError as error:
        return Reproduction(module=culprit, reason=error.message)
    except (OSError, ValueError):
        return Reproduction(
            module=culprit, reason=f"the module cannot be carried into a script: {captured / 'stderr.txt'}"
        )
    claim = _claim(culprit, failure, setup, description, made_with)
    reason = "no script could be written"
    for configs in (False, True):
        try:
            text = script_text(description, claim, configs=configs)
        except CannotBeWrittenError as error:
            return Reproduction(module=culprit, reason=str(error))
        status, said, errors = _written(runner.directory, text, captured / _CAPTURED[1])
        line = next((line for line in said.splitlines() if line.startswith(_FAILS)), "")
        if status == 1 and line:
            size = (runner.directory / TENSORS).stat().st_size
            return Reproduction(module=culprit, script=SCRIPT, bytes=size, said=line)
        ended = status in (0, 2)  # in its own words
        reason = f"by itself the module does not fail: {_last_line(said if ended else errors)}"
    for name in (SCRIPT, TENSORS):
        (runner.directory / name).unlink(missing_ok=True)
    return Reproduction(module=culprit, reason=reason)


def _written(directory: Path, text: str, tensors: Path) -> tuple[int, str, str]:
    (directory / SCRIPT).write_text(text, encoding="utf-8")
    shutil.copyfile(tensors, directory / TENSORS)
    return run_clean(directory / SCRIPT, TIME_LIMIT)


def _claim(culprit: str, failure: Symptom, setup: ReferenceSetup, description: dict[str, Any], made_with: str) -> Claim:
    cls = description["recipe"]["class"].rpartition(":")[2]
    part = "own arithmetic of " if culprit.endswith(OWN) else ""
    return Claim(
        title=f"{part}{cls} ({culprit.removesuffix(OWN) or 'the whole model'}): {failure.kind}",
        about=(
            f"Found by bisection of {setup.workload.scenario.name!r} with {setup.workload.words}: {failure.reason}.",
            "With this part alone in float32 the run is healthy; without that it fails.",
        ),
        check=_check(failure),
        limit=WRONG,
        made_with=made_with,
    )


def _check(failure: Symptom) -> str:
    if failure.kind is Kind.DTYPE_ERROR:
        return "dtype"
    if failure.kind is Kind.INACCURATE:
        return "accuracy"
    return "backward" if failure.phase in ("backward", "recompute") else "forward"


def _made_with(versions: dict[str, str]) -> str:
    return ", ".join(_known(versions)) or "unknown versions"


def _known(versions: dict[str, str]) -> Iterator[str]:
    for name in _LIBRARIES:
        if name in versions:
            yield f"{name} {versions[name]}"


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


_RUN = """
import runpy, sys
sys.path.append(sys.argv.pop())
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_clean(script: Path, time_limit: float) -> tuple[int, str, str]:
    """Runs ``script`` in its own directory; modules of the present directory can be imported where no other has their name.

    Returns:
        The exit status (minus the signal that ended it, -1 at the time limit), its output, and what it wrote of errors.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", _RUN, script.name, str(Path.cwd())],
            cwd=script.parent,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=time_limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return -1, "", f"it was stopped after {time_limit:.0f} s"
    return done.returncode, done.stdout, done.stderr
