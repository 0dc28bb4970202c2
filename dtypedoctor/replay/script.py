"""Writes a stand-alone script that makes one call of a module and shows that it fails, from the description of the call.

The script needs torch and the library of the module, not this package. Whatever was captured is text of somebody else's. In the script it is data:
a literal as ``repr`` writes it, or a comment. What is executed is ``source``, the text of classes of the user's own, and nobody but the caller knows
whether that may be.
"""

import contextlib
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from math import isfinite, prod
from typing import Any

from dtypedoctor.foreign_files import parse_json, read_file
from dtypedoctor.redaction.redact import redact
from dtypedoctor.redaction.secrets import SECRET, names_a_secret
from dtypedoctor.replay.capsule import CAPSULE_TENSORS, Capsule
from dtypedoctor.scenario.problems import printable
from dtypedoctor.values import dataclass

__all__ = ["TENSORS", "CannotBeWrittenError", "Carried", "Claim", "capsule_script", "inline_tensors", "script_text"]

TENSORS = "repro.safetensors"
"""Name of the file with the tensors, beside the script."""

_LINE = 100
"""Characters of a dictionary that stands in one line."""

_KINDS = frozenset({
    "value", "float", "tensor", "dtype", "device", "tuple", "list", "dict", "pairs", "function", "partial", "mapping", "config", "object", "opaque",
})  # fmt: skip
"""The forms of a described value."""

_PLAIN = {
    "float": "float({!r})",
    "tensor": "T[{!r}]",
    "dtype": "dtype({!r})",
    "device": "torch.device(DEVICE)",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What a script carries beside the call itself.

    Attributes:
        source: text of classes that no library has; it is executed as it is.
        random: whether the generator is put into the state ``random`` among the tensors.
        tensors: name of the file with the tensors, beside the script.
        drawn: by name of a tensor that was left out, how to draw another one: ``shape``, ``dtype``, ``scale``, ``seed``.
        inline: by name of a tensor an expression for it; where it is given, no file is read.
    """

    source: str = ""
    random: bool = False
    tensors: str = TENSORS
    drawn: Mapping[str, Any] = field(default_factory=dict)
    inline: Mapping[str, str] | None = None


def script_text(capture: Mapping[str, Any], claim: Claim, *, configs: bool, carried: Carried | None = None) -> str:
    """The script.

    Args:
        capture: the description that the worker has written; see ``instrument/capture.py`` for its form.
        claim: what it is to show.
        configs: also give the module its configuration objects, which most forwards do not need.
        carried: what stands in it beside the call.

    Raises:
        CannotBeWrittenError: an argument of the call cannot be made by a script.
    """
    carried = carried or Carried()
    writer = _Writer(configs=configs)
    needed = {
        "own": bool(capture["calls"] or capture.get("own")),
        "backward": claim.check == "backward",
        "accuracy": claim.check == "accuracy",
        "random": carried.random,
        "file": carried.inline is None,
        "recurrent": "torch.nn.modules.rnn:" in str(capture["recipe"]),
        "partial": "'partial': " in str(capture),
        "forward": "'forward': " in str(capture["recipe"]),
        "output": claim.check != "dtype" or bool(capture["calls"] or capture.get("own")),
        "autocast": bool(capture["autocast"]),
        "buffers": any(recipe["buffers"] for recipe in _recipes(capture["recipe"])),
        "children": bool(capture["recipe"]["children"]),
    }
    needed |= {"raises": not needed["output"], "plain": not needed["autocast"]}
    needless = tuple(f" @{name}" for name, is_needed in needed.items() if not is_needed)
    body = _without(needless, HEAD).format(
        about=_comment((claim.title, *claim.about, f"Made with {claim.made_with}.")),
        source=_source(carried.source),
        check=claim.check,
        limit=float(claim.limit),
        grad=bool(capture["grad"] or claim.check == "backward"),
        random="random" if carried.random else None,
        autocast=[tuple(region) for region in capture["autocast"]],
        module=_indented(writer.module(capture["recipe"]), 4),
        positional="".join(f"{writer.value(value)}, " for value in capture["args"]).rstrip(),
        named=writer.mapping(capture["kwargs"]),
        kept=_kept(carried),
        calls=_in_lines([f"({name!r}, lambda T: {writer.value(result)})," for name, result in capture["calls"]]),
        gradients=_in_lines(_gradients(capture)),
    )
    end = _without(needless, END)
    functions = _without(needless, "".join(_helpers(body + end)) + end)
    return body + functions.replace("\n\n\n", "\n\n")


def _recipes(recipe: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The recipe of a module and of those in it."""
    yield recipe
    for child in recipe["children"].values():
        if child is not None:
            yield from _recipes(child)


def _source(text: str) -> str:
    """The text of the user's classes, without an import that the script has anyway."""
    lines = "\n".join(line for line in text.splitlines() if line != "import torch").strip()
    return f"{lines}\n\n\n" if lines else ""


def _in_lines(items: list[str]) -> str:
    """The items of a literal, each in a line of its own, which is closed in the line after them."""
    return "".join(f"\n    {item}" for item in items) + "\n" if items else ""


def _gradients(capture: Mapping[str, Any]) -> list[str]:
    """The gradients that came back, by what had left the module and its index there."""
    return [
        f"{(place, int(index))}: {key!r},"
        for place, leaving in enumerate(capture["leaving"])
        for index, key in leaving["gradients"].items()
    ]


_CHECKS = {"raised": "dtype", "nonfinite": "forward", "backward": "backward", "silent": "accuracy"}
_INACCURATE = 1e-2
"""Relative error from which on a silent failure shows; rounding to float16 or bfloat16 stays below."""


def _check(held: Mapping[str, Any]) -> str:
    """What the script looks for; a call that raises in its backward pass was kept with the gradients that come back."""
    goes_back = held["kind"] == "raised" and any(one["gradients"] for one in held["call"]["leaving"])
    return "backward" if goes_back else _CHECKS.get(held["kind"], "forward")


def capsule_script(capsule: Capsule, *, tensors: str = TENSORS, inline: bool = False) -> str:
    """The script that makes the call of a capsule.

    Args:
        capsule: what was kept.
        tensors: name of the file beside the script in which its tensors are.
        inline: write the tensors into the script where they are small.

    Raises:
        CannotBeWrittenError: the capsule is damaged, or holds something that no script can make.
    """
    held, finding = capsule.description, capsule.finding
    try:
        data = read_file(capsule.directory / CAPSULE_TENSORS, capsule.bytes) if inline else b""
        carried = Carried(
            source=held["source"],
            random=held["random"],
            tensors=tensors,
            drawn=held["drawn"],
            inline=inline_tensors(data) if inline else None,
        )
        where = f"{capsule.cls} ({capsule.fqn or 'the whole model'})"
        claim = Claim(
            title=f"{where}: {finding.get('id')}",
            about=(str(finding.get("summary", "")),),
            check=_check(held),
            limit=_INACCURATE,
            made_with=", ".join(f"{name} {version}" for name, version in capsule.versions.items()),
        )
        return script_text(held["call"], claim, configs=True, carried=carried)
    except (KeyError, TypeError, ValueError, AttributeError, OSError, RecursionError) as error:
        raise CannotBeWrittenError(f"it is damaged ({type(error).__name__}: {error})") from error


def _kept(carried: Carried) -> str:
    """The body of the function that gives the tensors, by name."""
    if carried.inline is not None:
        lines = ["    T = {", *(f"        {name!r}: {text}," for name, text in carried.inline.items()), "    }"]
    else:
        lines = [f"    T = load(Path(__file__).with_name({carried.tensors!r}))"]
    for name, how in carried.drawn.items():
        shape, scale, seed = [int(size) for size in how["shape"]], float(how["scale"]), int(how["seed"])
        lines.append(f"    T[{name!r}] = drawn({shape}, {how['dtype']!r}, {scale!r}, {seed})")
    return "\n".join((*lines, "    return T"))


def _without(needless: tuple[str, ...], text: str) -> str:
    """The text without the lines that end in one of the marks, and without all marks."""
    lines = [line for line in text.split("\n") if not line.endswith(needless)]
    return re.sub(
        r"(  #)? @(own|backward|accuracy|random|file|recurrent|forward|partial|output|raises|autocast|plain|buffers|children)$",
        "",
        "\n".join(lines),
        flags=re.MULTILINE,
    )


def _helpers(text: str) -> Iterator[str]:
    """The functions that ``text`` calls, and those that they call."""
    wanted = [text]
    left = dict(HELPERS)
    chosen = set()
    while wanted:
        used = wanted.pop()
        for name in [name for name in left if re.search(rf"\b{name}\b[.(]", used)]:
            chosen.add(name)
            wanted.append(left.pop(name))
    yield from (HELPERS[name] for name in HELPERS if name in chosen)


def inline_tensors(data: bytes, most: int = 256) -> dict[str, str] | None:
    """Expressions for the tensors of a safetensors file, by name; None where it holds more than ``most`` elements.

    Raises:
        ValueError: it is not such a file.
    """
    length = int.from_bytes(data[:8], "little")
    header = parse_json(data[8 : 8 + length])
    header.pop("__metadata__", None)
    if sum(prod(entry["shape"]) for entry in header.values()) > most:
        return None
    found = {}
    for name, entry in header.items():
        begin, end = (8 + length + int(offset) for offset in entry["data_offsets"])
        dtype, code = _CODES[entry["dtype"]]
        values = _values(data[begin:end], code)
        texts = ", ".join(f"float({str(v)!r})" if isinstance(v, float) and not isfinite(v) else repr(v) for v in values)
        shape = [int(size) for size in entry["shape"]]
        found[name] = f"torch.tensor([{texts}], dtype=torch.{dtype}).reshape({shape})"
    return found


def _values(data: bytes, code: str) -> list[Any]:
    if code != "bfloat16":
        return [value for (value,) in struct.iter_unpack(f"<{code}", data)]
    wide = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))  # the upper half of a float32
    return [value for (value,) in struct.iter_unpack("<f", wide)]


_CODES = {
    "F64": ("float64", "d"), "F32": ("float32", "f"), "F16": ("float16", "e"), "BF16": ("bfloat16", "bfloat16"), "I64": ("int64", "q"),
    "I32": ("int32", "i"), "I16": ("int16", "h"), "I8": ("int8", "b"), "U8": ("uint8", "B"), "BOOL": ("bool", "?"),
}  # fmt: skip
"""Dtypes of a safetensors file: torch's names, and how ``struct`` reads them."""


def _comment(texts: Iterable[str]) -> str:
    """Texts as comments, redacted, each of their lines behind a ``#`` and with nothing in it that would end the line."""
    lines = [line for text in texts for line in redact(text).split("\n")]
    return "\n".join(f"# {printable(line)}".rstrip() for line in lines)


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
            return self.mapping(content)
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

    def mapping(self, content: Mapping[str, Any]) -> str:
        """A dictionary of described values by name."""
        return "{" + ", ".join(f"{name!r}: {self._named(name, item)}" for name, item in content.items()) + "}"

    def _named(self, name: str, described: Mapping[str, Any]) -> str:
        """A value by its name, which may say that it is secret."""
        secret = names_a_secret(name) and isinstance(described.get("value"), str)
        return repr(SECRET) if secret else self.value(described)

    def _imported(self, kind: str, described: Mapping[str, Any]) -> str:
        if kind == "mapping":
            return f"found({described['mapping']!r})(**{self.mapping(described['values'])})"
        if kind == "object":
            return f"holding({described['object']!r}, {self.value(described['values'])})"
        if kind == "partial":
            given = "".join(f", {self.value(item)}" for item in described["args"])
            return (
                f"functools.partial({self.value(described['partial'])}{given}, **{self.mapping(described['kwargs'])})"
            )
        if kind == "config":
            values = self.value(described["values"])
            return f"configured({described['config']!r}, {values}, {self.mapping(described['chosen'])})"
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


HEAD = '''"""One call of a module that fails by itself: it needs torch and the library of the module, nothing else.

Run:     python repro.py
Expect:  a line that begins with FAILS, and exit status 1. Exit status 0 means that it is fixed.
"""

{about}

import functools  # @partial
import importlib
import json  # @file
import sys
import types
from contextlib import ExitStack  # @autocast
from pathlib import Path  # @file

import torch

{source}CHECK = {check!r}
LIMIT = {limit!r}  # of the relative error @accuracy
GRAD = {grad!r}
AUTOCAST = {autocast!r}  # @autocast
RANDOM = {random!r}  # the tensor that holds the state of the random generator @random
DEVICE = "cpu"
CAST = {{}}  # dtypes that stand for others, while the call is made in float32


def module(T):
    """The module, with its weights."""
    return {module}


def arguments(T):
    """What it is called with."""
    return ({positional}), {named}


def kept():
    """The tensors of the call, by name."""
{kept}


CALLS = [{calls}]  # what the modules inside returned, in order @own
GRADIENTS = {{{gradients}}}  # of what has left the module @backward
LEFT = []  # what has left the module, in order: to the modules in it, and as its output @output
RETURNED = []  # what the modules in it are going to return @own
'''

HELPERS = {
    "Recorded": '''

class Ended(Exception):
    """The next thing that comes into the module was a consequence of the failure."""


class Recorded(torch.nn.Module):
    """Stands for a module inside: takes note of what it is given, and returns what the real one returned."""

    def forward(self, *args, **kwargs):
        name, result = RETURNED.pop(0) if RETURNED else ("the next one", None)
        LEFT.append((f"what {name} is given", list(tensors((args, kwargs)))))
        if result is None or any(bad(tensor) for tensor in tensors(result)):
            raise Ended
        return result
''',
    "made": '''

def made(cls, attributes, parameters={}, buffers={}, children={}, forward=None):
    """An instance of a module class, without calling its constructor."""
    instance = found(cls).__new__(found(cls))
    torch.nn.Module.__init__(instance)
    vars(instance).update(attributes)
    for name, value in parameters.items():
        if value is not None and not hasattr(value, "quant_state"):
            value = torch.nn.Parameter(value, requires_grad=value.is_floating_point())
        instance.register_parameter(name, value)
    for name, value in buffers.items():  # @buffers
        instance.register_buffer(name, value)  # @buffers
    for name, child in children.items():  # @children
        instance.add_module(name, child)  # @children
    if hasattr(instance, "_init_flat_weights"):  # @recurrent
        instance._init_flat_weights()  # @recurrent
    if forward is not None:  # @forward
        instance.forward = types.MethodType(found(forward), instance)  # @forward
    return instance
''',
    "configured": """

def configured(cls, values, chosen):
    config = found(cls).from_dict(values)
    for name, value in chosen.items():
        if value is not None:
            setattr(config, name, value)
    return config
""",
    "holding": '''

def holding(cls, values):
    """An object of a class, with what it held."""
    instance = found(cls).__new__(found(cls))
    vars(instance).update(values)
    return instance
''',
    "packed": '''

def packed(data, state):
    """A 4-bit weight of bitsandbytes; in float32 its codes stay what they are."""
    weight = found("bitsandbytes.nn:Params4bit").from_prequantized(data, state, device=DEVICE)
    weight.quant_state.dtype = dtype(str(weight.quant_state.dtype).removeprefix("torch."))
    return weight
''',
    "found": '''

def found(name):
    """A class or function by its module and name; ``source`` is this file."""
    module_name, _, path = name.partition(":")
    thing = types.SimpleNamespace(**globals()) if module_name == "source" else importlib.import_module(module_name)
    for part in path.split("."):
        thing = getattr(thing, part)
    return thing
''',
    "dtype": '''

def dtype(name):
    """A dtype that the module or its caller named."""
    return CAST.get(getattr(torch, name), getattr(torch, name))
''',
    "tensors": """

def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif hasattr(value, "values") or isinstance(value, types.SimpleNamespace):
        for item in (vars(value) if isinstance(value, types.SimpleNamespace) else value).values():
            yield from tensors(item)
""",
    "bad": """

def bad(tensor):
    return int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
""",
    "drawn": '''

def drawn(shape, dtype, scale, seed):
    """A random weight in the place of one that was left out."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(getattr(torch, dtype))
''',
    "gradients": '''

def gradients(T):
    """Goes back with the recorded gradients: what comes out at the inputs and weights."""
    ends = [(LEFT[place][1][index], T[key]) for (place, index), key in GRADIENTS.items() if place < len(LEFT)]
    ends = [(tensor, gradient.to(tensor.dtype)) for tensor, gradient in ends if tensor.requires_grad]
    torch.autograd.backward([tensor for tensor, _ in ends], [gradient for _, gradient in ends])
    return [(f"the gradient of {name}", [t.grad]) for name, t in T.items() if t.is_leaf and t.grad is not None]
''',
    "load": '''

def load(path):
    """Reads a safetensors file: eight bytes with the length of a JSON header, the header, the data."""
    dtypes = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
              "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    read = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            flat = torch.frombuffer(data[begin:end], dtype=dtypes[entry["dtype"]]) if end > begin else torch.empty(0)
            read[name] = flat.to(dtypes[entry["dtype"]]).reshape(entry["shape"]).clone()
    return read
''',
}
"""Functions of the script by name, each there only where something calls it."""

END = '''

def attempt(wide):
    """Makes the call; in float32 with ``wide``. What has left the module, and what it raised."""
    T = kept()
    CAST.clear()
    if wide:
        CAST.update({torch.float16: torch.float32, torch.bfloat16: torch.float32})
        T = {name: t.float() if t.dtype in CAST and ".packed" not in name else t for name, t in T.items()}
    fixed = [name for name, t in T.items() if not t.is_floating_point() or "gradient" in name or ".packed" in name]  # @backward
    T = {name: t if name in fixed else t.requires_grad_() for name, t in T.items()}  # @backward
    torch.set_rng_state(T.pop(RANDOM))  # @random
    LEFT.clear()  # @output
    RETURNED[:] = [(name, result(T)) for name, result in CALLS]  # @own
    raised = None
    with torch.set_grad_enabled(GRAD):  # @plain
    with ExitStack() as stack:  # @autocast
        stack.enter_context(torch.set_grad_enabled(GRAD))  # @autocast
        for device, name in [] if wide else AUTOCAST:  # @autocast
            stack.enter_context(torch.autocast(device, dtype=getattr(torch, name)))  # @autocast
        try:
            args, kwargs = arguments(T)
            LEFT.append(("the output", list(tensors(module(T)(*args, **kwargs)))))  # @output
            module(T)(*args, **kwargs)  # @raises
        except Ended:  # @own
            pass  # @own
        except RuntimeError as error:
            raised = error
    if raised is None:  # @backward
        try:  # @backward
            return gradients(T), raised  # @backward
        except RuntimeError as error:  # @backward
            raised = error  # @backward
    return list(LEFT), raised  # @output
    return [], raised  # @raises


def main():
    print(f"torch {torch.__version__}")
    (narrow, raised), (wide, raised_wide) = attempt(False), attempt(True)
    if raised_wide is not None:
        return done(2, f"float32 raises too: {raised_wide}")
    if CHECK == "dtype" or raised is not None:
        return done(1, f"FAILS: {raised} (in float32 nothing is raised)") if raised else done(0, "nothing is raised")
    for (what, given), (_, exact) in zip(narrow, wide):  # @output
        for tensor, reference in zip(given, exact):  # @output
            if not tensor.is_floating_point():  # @output
                continue  # @output
            count, largest = bad(tensor), reference.detach().abs().amax().item() if reference.numel() else 0.0  # @output
            print(f"{what}: {tensor.dtype}, {count} not finite; the largest in float32: {largest:g}")  # @output
            if bad(reference):  # @output
                return done(2, f"{what} is not finite in float32 either")  # @output
            if CHECK != "accuracy" and count:  # @output
                return done(1, f"FAILS: {what}: {count} of {tensor.numel()} elements are inf or NaN in {tensor.dtype}")  # @output
            error = float((tensor.float() - reference).norm() / reference.norm().clamp_min(1e-30))  # @accuracy
            if error > LIMIT:  # @accuracy
                return done(1, f"FAILS: {what} has a relative error of {error:.3g} against float32")  # @accuracy
    return done(0, "everything is as it should be")  # @output


def done(status, sentence):
    print(sentence)
    return status


if __name__ == "__main__":
    sys.exit(main())
'''
