"""Writes a stand-alone script that makes one call of a module and shows that it fails, from the description of the call.

The script needs torch and the library of the module, not this package. Whatever was captured is text of somebody else's. In the script it is data:
a literal as ``repr`` writes it, or a comment. What is executed is ``source``, the text of classes of the user's own, and nobody but the caller knows
whether that may be.
"""

import contextlib
import re
import struct
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from dtypedoctor.redaction.redact import redact
from dtypedoctor.redaction.secrets import SECRET, names_a_secret
from dtypedoctor.replay.capsule import DTYPE, KINDS, Capsule
from dtypedoctor.tensor_files import Entry
from dtypedoctor.text import printable

__all__ = ["TENSORS", "CannotBeWrittenError", "Carried", "Claim", "capsule_script", "inline_tensors", "script_text"]

TENSORS = "repro.safetensors"
"""Name of the file with the tensors, beside the script."""

_LINE = 140
"""Characters of a dictionary, or of a module, that stands in one line."""

_NEVER_READ = frozenset({
    "_is_hf_initialized", "name_or_path", "_tp_plan", "_ep_plan", "_pp_plan", "_fsdp_plan", "_sp_plan", "all_tied_weights_keys", "kernel_config",
    "generation_config",
})  # fmt: skip
"""Attributes of transformers' modules that no forward reads."""

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
        inputs: names of the tensors among the arguments that need a gradient; None for all of them.
        has_safetensors: whether the libraries that the script needs bring safetensors along.
    """

    source: str = ""
    random: bool = False
    tensors: str = TENSORS
    drawn: Mapping[str, Any] = field(default_factory=dict)
    inline: Mapping[str, str] | None = None
    inputs: Sequence[str] | None = None
    has_safetensors: bool = False


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
    # the text of the user's classes, without an import that the script has anyway
    lines = "\n".join(line for line in carried.source.splitlines() if line != "import torch").strip()
    parts = {
        "about": _comment((claim.title, *claim.about, f"Made with {claim.made_with}.")),
        "source": f"{lines}\n\n\n" if lines else "",
        "limit": float(claim.limit),
        "grad": bool(capture["grad"] or claim.check == "backward"),
        "random": "random" if carried.random else None,
        "autocast": [(str(device), _dtype(name)) for device, name in capture["autocast"]],
        "default": _dtype(capture.get("default_dtype", "float32")),
        "module": _module(capture, configs=configs),
        "arguments": _arguments(capture, configs=configs),
        "kept": _kept(carried),
        "gradients": _in_lines(_gradients(capture)),
        "inputs": list(_tensors_in(capture) if carried.inputs is None else carried.inputs),
    }
    needless = _needless(capture, claim, carried)
    if not any(name in str(parts) for name in ("DEVICE", "packed(")):
        needless = (*needless, " @device")
    body, end = _without(needless, HEAD).format(**parts), _without(needless, END)
    functions = _without(needless, "".join(_helpers(body + end)) + end)
    return body.rstrip() + "\n" + functions.replace("\n\n\n", "\n\n")


def _needless(capture: Mapping[str, Any], claim: Claim, carried: Carried) -> tuple[str, ...]:
    """The marks of the lines that this script does not need."""
    recipes = list(_recipes(capture["recipe"]))
    reads_file = carried.inline is None
    needed = {
        "backward": claim.check == "backward",
        "accuracy": claim.check == "accuracy",
        "random": carried.random,
        "file": reads_file,
        "safetensors": reads_file and carried.has_safetensors,
        "load": reads_file and not carried.has_safetensors,
        "recurrent": "torch.nn.modules.rnn:" in str(capture["recipe"]),
        "forward": any("forward" in recipe for recipe in recipes),
        "compared": claim.check != "dtype",
        "autocast": bool(capture["autocast"]),
        "default": capture.get("default_dtype", "float32") != "float32",
        "buffers": any(recipe["buffers"] for recipe in recipes),
        "children": any(recipe["children"] for recipe in recipes),
    }
    needed |= {"plain": not needed["autocast"]}
    shared = claim.check == "backward" or any(count > 1 for count in Counter(_weights(recipes)).values())
    needed |= {"shared": shared, "alone": not shared}
    needed |= {"raising": not needed["compared"], "nonfinite": needed["compared"] and not needed["accuracy"]}
    return tuple(f" @{name}" for name, is_needed in needed.items() if not is_needed)


def _weights(recipes: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The name of the tensor of each parameter; of a tied one twice."""
    for recipe in recipes:
        yield from (kept for kept in recipe["parameters"].values() if isinstance(kept, str))


def _tensors_in(capture: Mapping[str, Any]) -> Iterator[str]:
    """Names of the tensors among the arguments."""
    waiting: list[Any] = [[capture["args"], list(capture["kwargs"].values())]]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping) and isinstance(value.get("tensor"), str):
            yield value["tensor"]
        elif isinstance(value, (Mapping, list)):
            waiting += reversed(list(value.values()) if isinstance(value, Mapping) else value)


def _module(capture: Mapping[str, Any], *, configs: bool) -> str:
    """The body of the function that gives the module, after what its classes and functions find as the program has left it."""
    writer = _Writer(configs=configs)
    made = _indented(writer.module(capture["recipe"]), 4)
    state = [f"    put({name!r}, {writer.value(value)})\n" for name, value in capture.get("state", {}).items()]
    return f"{writer.assignments()}{''.join(state)}    return {made}\n"


def _arguments(capture: Mapping[str, Any], *, configs: bool) -> str:
    """The body of the function that gives positional and named arguments."""
    writer = _Writer(configs=configs)
    positional = "".join(f"{writer.value(value)}, " for value in capture["args"]).rstrip()
    named = {name: writer.named(name, value) for name, value in capture["kwargs"].items()}
    return f"{writer.assignments()}    return ({positional}), {_dictionary(named)}\n"


def _recipes(recipe: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The recipe of a module and of those in it."""
    yield recipe
    for child in recipe["children"].values():
        if child is not None:
            yield from _recipes(child)


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


_BRING_SAFETENSORS = frozenset({"transformers", "peft"})
"""Libraries that depend on safetensors."""


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
        entries = capsule.tensors()
        carried = Carried(
            source=held["source"],
            random=held["random"],
            tensors=tensors,
            drawn=held["drawn"],
            inline=inline_tensors(entries) if inline else None,
            inputs=[name for name in held["requires_grad"] if name.startswith("input.")],
            has_safetensors=not _BRING_SAFETENSORS.isdisjoint(capsule.versions),
        )
        where = f"{capsule.cls} ({capsule.fqn or 'the whole model'})"
        claim = Claim(
            title=f"{where if capsule.operator is None else capsule.cls}: {finding.get('id')}",
            about=(str(finding.get("summary", "")),),
            check=_check(held),
            limit=min(_INACCURATE, (held.get("relative_error") or 1) / 2),
            made_with=", ".join(f"{name} {version}" for name, version in capsule.versions.items()),
        )
        text = script_text(held["call"], claim, configs=True, carried=carried)
    except (KeyError, TypeError, ValueError, AttributeError, OSError, ArithmeticError, RecursionError) as error:
        raise CannotBeWrittenError(f"it is damaged ({type(error).__name__}: {printable(str(error)[:200])})") from error
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(text, "repro.py", "exec")
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:  # too many nested lists, for example
        raise CannotBeWrittenError(
            f"Python cannot read it ({type(error).__name__}: {printable(str(error)[:200])})"
        ) from error
    return text


def _kept(carried: Carried) -> str:
    """The body of the function that gives the tensors, by name."""
    if carried.inline is not None:
        held = "".join(f"        {name!r}: {text},\n" for name, text in carried.inline.items())
        read = f"{{\n{held}    }}"
    else:
        function = "load_file" if carried.has_safetensors else "load"
        read = f"{function}(Path(__file__).with_name({carried.tensors!r}))"
    if not carried.drawn:
        return f"    return {read}"
    lines = [f"    T = {read}"]
    for name, how in carried.drawn.items():
        shape, scale, seed = [int(size) for size in how["shape"]], float(how["scale"]), int(how["seed"])
        lines.append(f"    T[{name!r}] = drawn({shape}, {_dtype(how['dtype'])!r}, {scale!r}, {seed})")
    return "\n".join((*lines, "    return T"))


def _without(needless: tuple[str, ...], text: str) -> str:
    """The text without the lines that end in one of the marks, and without all marks."""
    lines = [line for line in text.split("\n") if not line.endswith(needless)]
    return _MARK.sub("", "\n".join(lines))


_MARK = re.compile(r"(  #)? @[a-z]+$", re.MULTILINE)
"""Ends a line that only some scripts need."""


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


def inline_tensors(entries: Sequence[Entry], most: int = 256) -> dict[str, str] | None:
    """Expressions for the tensors of a safetensors file, by name; None where it holds more than ``most`` elements.

    Raises:
        ValueError: it is not such a file.
        OSError: it cannot be read.
    """
    if sum(entry.elements for entry in entries) > most:
        return None
    found = {}
    for entry in entries:
        values = _values(entry.read(), _CODES[entry.dtype])
        texts = ", ".join(f"float({str(v)!r})" if isinstance(v, float) and not isfinite(v) else repr(v) for v in values)
        found[entry.name] = f"torch.tensor([{texts}], dtype=torch.{entry.dtype}).reshape({list(entry.shape)})"
    return found


def _values(data: bytes, code: str) -> list[Any]:
    if code != "bfloat16":
        return [value for (value,) in struct.iter_unpack(f"<{code}", data)]
    wide = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))  # the upper half of a float32
    return [value for (value,) in struct.iter_unpack("<f", wide)]


_CODES = {
    "float64": "d", "float32": "f", "float16": "e", "bfloat16": "bfloat16", "int64": "q", "int32": "i", "int16": "h", "int8": "b", "uint8": "B", "bool": "?",
}  # fmt: skip
"""How ``struct`` reads the elements of a dtype."""


def _comment(texts: Iterable[str]) -> str:
    """Texts as comments, redacted, each of their lines behind a ``#`` and with nothing in it that would end the line."""
    lines = [line for text in texts for line in redact(text).split("\n")]
    return "\n".join(f"# {printable(line)}".rstrip() for line in lines)


_OPERATOR = re.compile(r"aten\.[a-z_0-9]+\.[A-Za-z_0-9]+")


class _Writer:
    """Writes expressions.

    Args:
        configs: whether modules get their configuration objects.
    """

    def __init__(self, *, configs: bool = True) -> None:
        self._configs = configs
        self._shared: dict[str, str] = {}
        """By expression of a configuration object the name of the variable that holds it."""

    def assignments(self) -> str:
        """The lines that make the configuration objects of the expressions written so far."""
        return "".join(f"    {name} = {text}\n" for text, name in self._shared.items())

    def value(self, described: Mapping[str, Any]) -> str:
        """A Python expression for a described value; ``T`` holds the tensors."""
        ((kind, content),) = [(k, v) for k, v in described.items() if k in KINDS]
        if kind == "value":
            return repr(redact(content) if isinstance(content, str) else content)
        if kind in _PLAIN:
            return _PLAIN[kind].format(_dtype(content) if kind == "dtype" else content)
        if kind in ("tuple", "list", "set", "size", "dict", "pairs"):
            return self._holding(kind, content)
        return self._imported(kind, described)

    def _holding(self, kind: str, content: Any) -> str:
        """A container as an expression."""
        if kind == "dict":
            return self.mapping(content)
        if kind == "pairs":
            return "{" + ", ".join(f"{self.value(name)}: {self.value(item)}" for name, item in content) + "}"
        items = ", ".join(map(self.value, content))
        if kind == "tuple":
            return f"({items},)" if content else "()"
        return {"list": "[{}]", "set": "set([{}])", "size": "torch.Size([{}])"}[kind].format(items)

    def module(self, recipe: Mapping[str, Any]) -> str:
        """A Python expression that makes a module, or names an operator."""
        if "operator" in recipe:
            if not _OPERATOR.fullmatch(recipe["operator"]):
                raise CannotBeWrittenError("it names no operator of torch")
            return f"torch.ops.{recipe['operator']}"
        given = [f"{name}={text}" for name, text in self._parts(recipe) if text != "{}"]
        flat = f"made({', '.join([repr(recipe['class']), *given])})"
        if len(flat) <= _LINE and "\n" not in flat:
            return flat
        lines = "".join(f"    {_indented(text, 4)},\n" for text in given)
        return f"made({recipe['class']!r},\n{lines})"

    def _parts(self, recipe: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """What a module is made of, as expressions by the names that ``made`` has for it."""
        yield "attributes", _dictionary(self._attributes(recipe))
        yield "parameters", _dictionary({name: _held(kept) for name, kept in recipe["parameters"].items()})
        yield "buffers", _dictionary({name: _held(kept) for name, kept in recipe["buffers"].items()})
        if recipe["children"]:
            yield (
                "children",
                _nested({name: self.module(child) if child else "None" for name, child in recipe["children"].items()}),
            )
        if "forward" in recipe:
            yield "forward", repr(recipe["forward"])

    def _attributes(self, recipe: Mapping[str, Any]) -> dict[str, str]:
        """Attributes as expressions; what no script can make is left out, and missed only if the forward reads it."""
        found = {}
        for name, described in recipe["attributes"].items():
            if name in _NEVER_READ or (name == "training" and described.get("value") is True):
                continue
            if self._configs or "config" not in described:
                with contextlib.suppress(CannotBeWrittenError):
                    found[name] = self.named(name, described)
        return found

    def mapping(self, content: Mapping[str, Any]) -> str:
        """A dictionary of described values by name."""
        return "{" + ", ".join(f"{name!r}: {self.named(name, item)}" for name, item in content.items()) + "}"

    def named(self, name: str, described: Mapping[str, Any]) -> str:
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
            chosen = {name: item for name, item in described["chosen"].items() if item.get("value", item) is not None}
            text = f"configured({described['config']!r}, {values}, {self.mapping(chosen)})"
            number = len(self._shared) + 1
            return self._shared.setdefault(text, "config" if number == 1 else f"config_{number}")
        raise CannotBeWrittenError(f"a {described[kind]} cannot be carried into a script")


def _dtype(name: Any) -> str:
    """The name of a dtype, which the script looks up in torch.

    Raises:
        CannotBeWrittenError: it is the name of something else.
    """
    if not isinstance(name, str) or not DTYPE.fullmatch(name):
        raise CannotBeWrittenError(f"{printable(repr(name)[:60])} is no dtype")
    return name


def _held(kept: str | Mapping[str, Any] | None) -> str:
    """A parameter or buffer as an expression."""
    if kept is None or isinstance(kept, str):
        return "None" if kept is None else f"T[{kept!r}]"
    state = ", ".join(f"{name!r}: T[{key!r}]" for name, key in kept["state"].items())
    return f"packed(T[{kept['packed']!r}], {{{state}}})"


def _dictionary(expressions: Mapping[str, str]) -> str:
    """A dictionary of expressions, one a line where it is long."""
    flat = "{" + ", ".join(f"{name!r}: {text}" for name, text in expressions.items()) + "}"
    return flat if len(flat) <= _LINE else _nested(expressions)


def _nested(expressions: Mapping[str, str]) -> str:
    """A dictionary of expressions, one a line."""
    return "{\n" + "".join(f"    {name!r}: {_indented(text, 4)},\n" for name, text in expressions.items()) + "}"


def _indented(text: str, spaces: int) -> str:
    return text.replace("\n", "\n" + " " * spaces)


HEAD = '''"""One call of a module that fails by itself: it needs torch and the library of the module, nothing else.

Run:     python repro.py
Expect:  a line that begins with FAILS, and exit status 1. Exit status 0 means that it is fixed.
"""

{about}

import functools
import importlib
import json  # @load
import sys
import types
from contextlib import ExitStack  # @autocast
from pathlib import Path  # @file

import torch
from safetensors.torch import load_file  # @safetensors

{source}GRAD = {grad!r}
LIMIT = {limit!r}  # of the relative error @accuracy
AUTOCAST = {autocast!r}  # @autocast
DEFAULT_DTYPE = getattr(torch, {default!r})  # of the forward pass @default
RANDOM = {random!r}  # the tensor that holds the state of the random generator @random
DEVICE = "cpu"  # @device
CAST = {{}}  # dtypes that stand for others, while the call is made in float32


def module(T):
    """The module, with its weights."""
{module}

def arguments(T):
    """What it is called with."""
{arguments}

def kept():
    """The tensors of the call, by name."""
{kept}


GRADIENTS = {{{gradients}}}  # of what has left the module @backward
INPUTS = {inputs!r}  # what needs a gradient beside the parameters @backward
LEAVES = {{}}  # the parameters by the identities of the tensors that they are made of @shared
'''

HELPERS = {
    "made": '''

def made(cls, attributes={}, parameters={}, buffers={}, children={}, forward=None):
    """An instance of a module class, without calling its constructor."""
    instance = found(cls).__new__(found(cls))
    torch.nn.Module.__init__(instance)
    vars(instance).update(attributes)
    for name, value in parameters.items():
        if value is not None and not hasattr(value, "quant_state"):
            value = torch.nn.Parameter(value, requires_grad=value.is_floating_point())  # @alone
            value = LEAVES.setdefault(id(value), torch.nn.Parameter(value, requires_grad=value.is_floating_point()))  # @shared
        instance._parameters[name] = value
    instance._buffers.update(buffers)  # @buffers
    instance._modules.update(children)  # @children
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
    "put": '''

def put(name, value):
    """Gives a global variable, or an attribute of a class, the value that the program had given it."""
    owner, _, name = name.rpartition(".")
    if owner:
        setattr(found(f"source:{owner}"), name, value)
    else:
        globals()[name] = value
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
    return functools.reduce(getattr, path.split("."), thing)
''',
    "dtype": '''

def dtype(name):
    """A dtype that the module or its caller named."""
    return CAST.get(getattr(torch, name), getattr(torch, name))
''',
    "tensors": """

def tensors(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, types.SimpleNamespace):
        value = vars(value)
    if hasattr(value, "values"):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors(item)] if isinstance(value, (tuple, list)) else []
""",
    "bad": """

def bad(tensor):
    return int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() or tensor.is_complex() else 0
""",
    "drawn": '''

def drawn(shape, dtype, scale, seed):
    """A random weight in the place of one that was left out."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(getattr(torch, dtype))
''',
    "gradients": '''

def gradients(T, left):
    """Goes back with the recorded gradients: what comes out at the inputs and weights."""
    ends = [(left[place][1][index], T[key]) for (place, index), key in GRADIENTS.items() if place < len(left)]
    ends = [(tensor, gradient.to(tensor.dtype)) for tensor, gradient in ends if tensor.requires_grad]
    torch.autograd.backward([tensor for tensor, _ in ends], [gradient for _, gradient in ends])
    leaves = {name: LEAVES.get(id(t), t) for name, t in T.items()}
    return [(f"the gradient of {name}", [t.grad]) for name, t in leaves.items() if t.is_leaf and t.grad is not None]
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
    if wide:
        CAST.update({torch.float16: torch.float32, torch.bfloat16: torch.float32})  # @compared
        CAST.update(dict.fromkeys([torch.float16, torch.bfloat16, torch.float64], torch.float32))  # @raising
        T = {name: t.float() if t.dtype in CAST and ".packed" not in name else t for name, t in T.items()}
    for name in INPUTS:  # @backward
        T[name].requires_grad_()  # @backward
    LEAVES.clear()  # @shared
    torch.set_rng_state(T.pop(RANDOM))  # @random
    torch.set_default_dtype(torch.float32 if wide else DEFAULT_DTYPE)  # @default
    left, raised = [], None
    with torch.set_grad_enabled(GRAD):  # @plain
    with ExitStack() as stack:  # @autocast
        stack.enter_context(torch.set_grad_enabled(GRAD))  # @autocast
        for device, name in [] if wide else AUTOCAST:  # @autocast
            stack.enter_context(torch.autocast(device, dtype=getattr(torch, name)))  # @autocast
        try:
            args, kwargs = arguments(T)
            left.append(("the output", tensors(module(T)(*args, **kwargs))))  # @compared
            module(T)(*args, **kwargs)  # @raising
        except Exception as error:
            raised = error
    torch.set_default_dtype(torch.float32)  # @default
    if raised is None:  # @backward
        try:  # @backward
            return gradients(T, left), None  # @backward
        except Exception as error:  # @backward
            raised = error  # @backward
    return list(left), raised


def main():
    print(f"torch {torch.__version__}")
    (narrow, raised), (wide, raised_wide) = attempt(False), attempt(True)
    if raised is not None:
        return done(1, f"FAILS: {raised} ({raised_wide or 'nothing is raised'} in float32)")
    if raised_wide is not None:
        print(f"in float32 it raises: {raised_wide}")
        wide = narrow  # @compared
    for (what, given), (_, exact) in zip(narrow, wide):  # @compared
        for tensor, reference in zip(given, exact):  # @compared
            if not tensor.is_floating_point():  # @compared
                continue  # @compared
            count, largest = bad(tensor), reference.detach().abs().amax().item() if reference.numel() else 0.0  # @compared
            print(f"{what}: {tensor.dtype}, {count} not finite; the largest in float32: {largest:g}")  # @compared
            if count:  # @nonfinite
                too = ", and in float32" if bad(reference) and raised_wide is None else ""  # @nonfinite
                return done(1, f"FAILS: {what}: {count} of {tensor.numel()} elements are inf or NaN in {tensor.dtype}{too}")  # @nonfinite
            error = float((tensor.float() - reference).norm() / reference.norm().clamp_min(1e-30))  # @accuracy
            if error > LIMIT:  # @accuracy
                return done(1, f"FAILS: {what} has a relative error of {error:.3g} against float32")  # @accuracy
    return done(0, "everything is as it should be")  # @compared
    return done(0, "nothing is raised")  # @raising


def done(status, sentence):
    print(sentence)
    return status


if __name__ == "__main__":
    sys.exit(main())
'''
