"""The text of a stand-alone script that repeats one captured call of a module. The script needs torch, not this package.

Whatever was captured is text of somebody else's. In the script it is data: a literal as ``repr`` writes it, or a comment.
"""

import contextlib
import keyword
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dtypedoctor.redaction.redact import redact
from dtypedoctor.redaction.secrets import SECRET, names_a_secret
from dtypedoctor.scenario.problems import printable
from dtypedoctor.trials.bisection.script_template import TEMPLATE

__all__ = ["CannotBeWrittenError", "Claim", "script_text"]


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
        if kind == "float":
            return f"float({content!r})"
        if kind == "tensor":
            return f"T[{content!r}]"
        if kind == "dtype":
            return f"dtype({content!r})"
        if kind == "tuple":
            return f"({''.join(self.value(item) + ', ' for item in content).rstrip()})" if content else "()"
        if kind == "list":
            return f"[{', '.join(self.value(item) for item in content)}]"
        if kind == "dict":
            return self._mapping(content)
        if kind == "pairs":
            return "{" + ", ".join(f"{self.value(name)}: {self.value(item)}" for name, item in content) + "}"
        return self._imported(kind, described)

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
        if kind == "function":
            return f"found({described['function']!r})"
        if kind == "mapping":
            return f"found({described['mapping']!r})(**{self._mapping(described['values'])})"
        if kind == "device":
            return f"torch.device({described['device']!r})"
        if kind == "object":
            return f"holding({described['object']!r}, {self.value(described['values'])})"
        if kind == "config":
            values = self.value(described["values"])
            return f"configured({described['config']!r}, {values}, {self._mapping(described['chosen'])})"
        raise CannotBeWrittenError(f"a {described[kind]} cannot be carried into a script")


_KINDS = frozenset({
    "value", "float", "tensor", "dtype", "device", "tuple", "list", "dict", "pairs", "function", "mapping", "config", "object", "opaque",
})  # fmt: skip


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


_LINE = 100


def _indented(text: str, spaces: int) -> str:
    return text.replace("\n", "\n" + " " * spaces)
