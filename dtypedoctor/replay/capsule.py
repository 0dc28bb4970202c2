"""A capsule: a directory that holds one failing module call, complete enough to be made again anywhere; and what one may name without its reader being asked.

``capsule.json`` says how the module and its arguments are made, ``capsule.safetensors`` holds their tensors. Nothing in either is executed as it
is, but for ``source``: the text of classes that live in the user's own files.

A capsule is data, but its data says which classes are made, what they hold, and which functions they call. So everything that it names must be on a
list, by its full name: a prefix is not enough, because ``torch.nn.parallel.distributed:os.system`` begins like a part of torch. A name has no step
that could lead on to another module. Whether a name is what its list says is looked up by who has torch, before anything is made
(:mod:`dtypedoctor.worker.call_fixes`). What is on no list runs only where the user allows it.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from os import fstat
from pathlib import Path
from typing import Any

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import is_real_directory, open_file, parse_json, read_file, reason
from dtypedoctor.tensor_files import Entry, read_entries
from dtypedoctor.text import printable

KINDS = frozenset({
    "value", "float", "tensor", "dtype", "device", "tuple", "list", "set", "size", "dict", "pairs", "function", "partial", "mapping", "config", "object", "opaque",
})  # fmt: skip
"""The forms of a described value."""
DTYPE = re.compile(r"(b?float|complex|u?int|q?u?int|bits)\d+[a-z0-9_]*|bool")
"""Names of torch's dtypes: of the rest of torch none looks so."""

_MODULE = (
    r"(torch\.nn\.modules\.\w+|torch\.nn\.utils\.parametri[sz]\w+"
    r"|transformers\.models\.\w+\.(modeling_\w+|quant_modules|vision|perceiver)|transformers\.(activations|pytorch_utils)"
    r"|peft\.(peft_model|mixed_model|utils\.other|tuners(\.\w+)+)|bitsandbytes\.nn\.modules):\w+"
)
_MODELING = r"transformers\.models\.\w+\.modeling_\w+"
_FUNCTIONAL = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d alpha_dropout avg_pool1d
    avg_pool2d avg_pool3d batch_norm bilinear binary_cross_entropy binary_cross_entropy_with_logits celu conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d cosine_embedding_loss cosine_similarity cross_entropy ctc_loss dropout dropout1d dropout2d dropout3d elu embedding
    embedding_bag feature_alpha_dropout fold gaussian_nll_loss gelu glu grid_sample group_norm gumbel_softmax hardshrink hardsigmoid hardswish hardtanh
    hinge_embedding_loss huber_loss instance_norm interpolate kl_div l1_loss layer_norm leaky_relu linear local_response_norm log_softmax logsigmoid
    margin_ranking_loss max_pool1d max_pool2d max_pool3d mish mse_loss nll_loss normalize one_hot pad pairwise_distance pdist pixel_shuffle
    pixel_unshuffle poisson_nll_loss prelu relu relu6 rms_norm rrelu scaled_dot_product_attention selu sigmoid silu smooth_l1_loss soft_margin_loss
    softmax softmin softplus softshrink softsign tanh tanhshrink threshold triplet_margin_loss unfold
"""

_NOT_COMPUTING = r"""
    from_file _print _assert_scalar _cufft_\w+ _nnpack_available _use_cudnn_rnn_flatten_weight can_cast is_vulkan_available promote_types
    result_type\.Scalar_Scalar sym_constrain_range\w*
"""
"""Operators that read files, print, or change settings: they take and give no tensors."""
_MACHINERY = r"""
    add_module apply bfloat16 buffers call_super_init children compile cpu cuda double dump_patches eval extra_repr float forward get_buffer
    get_extra_state get_parameter get_submodule half ipu load_state_dict modules mtia named_buffers named_children named_modules named_parameters
    parameters register_\w+ requires_grad_ set_extra_state set_submodule share_memory state_dict to to_empty train type xpu zero_grad T_destination
    _apply _buffers _modules _parameters _(forward|backward)_(pre_)?hooks\w* _(load_)?state_dict_(pre_|post_)?hooks _call_impl _compiled_call_impl
    _get_backward_(pre_)?hooks _get_name _init_flat_weights _is_full_backward_hook _load_from_state_dict _maybe_warn_non_full_backward_hook
    _named_members _non_persistent_buffers_set _register_\w+ _replicate_for_data_parallel _save_to_state_dict _slow_forward _version
    _wrapped_call_impl
"""
"""What every module has: with another forward, or a hook, an instance would do what its class does not."""
_CHOSEN = ("_attn_implementation", "_experts_implementation")
"""All that is set in a configuration after it was made."""

_ALLOWED = {
    "class": re.compile(_MODULE),
    "forward": re.compile(rf"{_MODULE}\.forward"),
    "config": re.compile(
        r"transformers\.models\.\w+\.configuration_\w+:\w+|transformers\.generation\.configuration_utils:GenerationConfig"
        r"|transformers\.utils\.quantization_config:BitsAndBytesConfig"
    ),
    "mapping": re.compile(rf"({_MODELING}|transformers\.modeling_outputs):\w*Output\w*|collections:OrderedDict"),
    "object": re.compile(
        rf"(transformers\.cache_utils|{_MODELING}):\w*(Cache|Layer)|transformers\.quantizers\.quantizer_bnb_\dbit:\w+"
        r"|peft\.tuners\.\w+\.(config|variants):\w+|peft\.tuners\.adalora\.layer:RankAllocator"
        r"|bitsandbytes\.(functional:QuantState|autograd\._functions:MatmulLtState)"
    ),
    "function": re.compile(
        rf"torch\.nn\.functional:({'|'.join(_FUNCTIONAL.split())})|transformers\.backbone_utils:BackboneType\.\w+"
        rf"|{_MODELING}:(\w+\.(compute_default_rope_parameters|num_patches)|multi_scale_deformable_attention\w*|mlstm_\w+|wrap_chunkwise_\w+)"
    ),
    "operator": re.compile(
        rf"aten\.(?!({'|'.join(_NOT_COMPUTING.split())})(\.|$))((?!__)[a-z_0-9]+|__i?(and|or|xor|lshift|rshift)__)\.\w+",
        re.ASCII,
    ),
    "dtype": DTYPE,
}
_ATTRIBUTE = {
    "class": re.compile(rf"(?!__|({'|'.join(_MACHINERY.split())})$)\w+"),
    "config": re.compile("|".join(_CHOSEN)),
    "object": re.compile(r"(?!__|forward$)\w+"),
}
"""What an instance may be given; the other names that its class uses itself are known only to who has the class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """Something that a description names.

    Attributes:
        role: what is made of it: ``class`` (of a module), ``forward``, ``config``, ``mapping``, ``object``, ``function``, ``operator``, ``dtype``, or
            ``kernel``, which transformers would load from the hub.
        name: of a class or function, ``module:Name``.
        attributes: what an instance of it holds.
    """

    role: str
    name: str
    attributes: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The name, so that a terminal can print it."""
        return printable(self.name[:100])


def why_not(named: Named) -> str:
    """Why something may not be made without asking, in words; empty where it may."""
    allowed = _ALLOWED.get(named.role)
    if allowed is None or not allowed.fullmatch(named.name):
        return f"the {named.role} {named.shown}"
    attribute = next((name for name in named.attributes if not _ATTRIBUTE[named.role].fullmatch(name)), None)
    return f"the attribute {printable(attribute[:100])} of {named.shown}" if attribute is not None else ""


def named_in(call: Mapping[str, Any]) -> Iterator[Named]:
    """Everything that the description of a call names; see ``instrument/capture.py`` for its form.

    Raises:
        Exception: it has another form; a damaged one can raise any type.
    """
    yield from _in_module(call["recipe"])
    yield from _in_values({str(number): value for number, value in enumerate(call["args"])})
    yield from _in_values(call["kwargs"])
    yield from _in_values(call["state"])
    yield from (Named(role="dtype", name=dtype) for _, dtype in call["autocast"])
    yield Named(role="dtype", name=call.get("default_dtype", "float32"))


def _in_module(recipe: Mapping[str, Any]) -> Iterator[Named]:
    if "operator" in recipe:
        yield Named(role="operator", name=recipe["operator"])
        return
    yield Named(role="class", name=recipe["class"], attributes=tuple(recipe["attributes"]))
    if "forward" in recipe:
        yield Named(role="forward", name=recipe["forward"])
    yield from _in_values(recipe["attributes"])
    for child in recipe["children"].values():
        if child is not None:
            yield from _in_module(child)


def _in_values(values: Mapping[str, Any]) -> Iterator[Named]:
    for name, described in values.items():
        # transformers takes `owner/repository` for one on the hub, whose code it would run
        if "implementation" in name or "kernel" in name:
            yield from (Named(role="kernel", name=text) for text in _texts(described) if "/" in text)
        yield from _in_value(described)


def _in_value(described: Mapping[str, Any]) -> Iterator[Named]:
    ((kind, content),) = [(key, value) for key, value in described.items() if key in KINDS]
    if kind == "value" and not isinstance(content, (bool, int, float, str, type(None))):
        raise TypeError("a value that is none")
    if kind in ("tuple", "list", "set", "size"):
        yield from _in_values({str(number): item for number, item in enumerate(content)})
    elif kind == "dict":
        yield from _in_values(content)
    elif kind == "pairs":
        for key, item in content:
            yield from _in_value(key)
            yield from _in_values({str(key.get("value")): item})
    elif kind == "partial":
        yield from _in_value(content)
        yield from _in_values({str(number): item for number, item in enumerate(described["args"])})
        yield from _in_values(described["kwargs"])
    elif kind in ("function", "dtype"):
        yield Named(role=kind, name=content)
    elif kind == "mapping":
        yield Named(role=kind, name=content)
        yield from _in_values(described["values"])
    elif kind in ("object", "config"):
        # the attributes of a configuration are set by its class
        held = described["values"]["dict"]
        yield Named(role=kind, name=content, attributes=tuple(held if kind == "object" else described["chosen"]))
        yield from _in_value(described["values"])
        yield from _in_values(described.get("chosen") or {})


def _texts(described: Any) -> Iterator[str]:
    """Every text in a described value."""
    if isinstance(described, str):
        yield described
    items: Iterable[Any] = described.values() if isinstance(described, dict) else described
    if isinstance(described, (dict, list)):
        for item in items:
            yield from _texts(item)


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
