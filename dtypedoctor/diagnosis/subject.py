"""A model as far as it is known without running it: from its files, or from what a worker has noted of its tensors."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dtypedoctor.dtypes import HALF
from dtypedoctor.trace.events import ParameterNote
from dtypedoctor.trace.model import Trace

FLOATS = frozenset({"float64", "float32", "float16", "bfloat16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticTensor:
    """A parameter or buffer.

    Attributes:
        name: dotted name.
        dtype: torch's name without the prefix.
        shape: sizes.
        trainable: whether it is trained; None where that is not known (a file does not say).
        values: its elements, for small tables of frequencies only.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    trainable: bool | None = None
    values: tuple[float, ...] = ()

    @property
    def elements(self) -> int:
        """Number of elements."""
        total = 1
        for size in self.shape:
            total *= size
        return total


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantState:
    """The quantization state of one packed weight.

    Attributes:
        weight: name of the weight.
        kind: ``nf4`` or ``fp4``.
        dtype: the dtype that the weight is dequantized to.
        compute_dtype: the dtype that the module computes in, where the model itself says so.
        nested: whether the statistics are quantized too.
    """

    weight: str
    kind: str
    dtype: str
    compute_dtype: str | None = None
    nested: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Intent:
    """What is to be done with the model.

    Attributes:
        dtype: the dtype that it will be loaded as; None for what its own files say.
        scaler: it will be trained with a gradient scaler.
        fsdp: it will be sharded with FSDP.
    """

    dtype: str | None = None
    scaler: bool = False
    fsdp: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What the checks look at.

    Attributes:
        name: what the user calls it.
        tensors: everything stored or noted, without the parts of quantization states.
        quant_states: of packed weights.
        config: ``config.json``, empty where there is none.
        adapter: ``adapter_config.json`` of a PEFT adapter, else None.
        keep_in_fp32: parts of module names that the model's class keeps in float32, by the attribute that lists them.
        loaded: whether the dtypes are those in memory; False for those in files.
        gaps: what could not be looked at, and why.
    """

    name: str
    tensors: tuple[StaticTensor, ...]
    quant_states: tuple[QuantState, ...] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    adapter: Mapping[str, Any] | None = None
    keep_in_fp32: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    loaded: bool = False
    intent: Intent = field(default_factory=Intent)
    gaps: tuple[str, ...] = ()

    @property
    def floating(self) -> tuple[StaticTensor, ...]:
        """The tensors of a dtype that a model computes in."""
        return tuple(tensor for tensor in self.tensors if tensor.dtype in FLOATS)

    @property
    def stored_dtype(self) -> str | None:
        """The dtype of most floating-point elements; None without any."""
        elements: Counter[str] = Counter()
        for tensor in self.floating:
            elements[tensor.dtype] += tensor.elements
        return elements.most_common(1)[0][0] if elements else None

    @property
    def config_dtype(self) -> str | None:
        """What ``config.json`` says under ``dtype`` or, before transformers 5, ``torch_dtype``."""
        return plain_dtype(self.config.get("dtype") or self.config.get("torch_dtype"))

    @property
    def load_dtype(self) -> str | None:
        """The dtype that transformers 5 loads the model in: the one asked for, else the config's, else the stored one."""
        return self.intent.dtype or self.config_dtype or self.stored_dtype

    def in_memory(self, tensor: StaticTensor) -> str:
        """The dtype of a floating-point tensor once it is loaded."""
        if self.loaded or tensor.dtype not in FLOATS:
            return tensor.dtype
        target = self.load_dtype or tensor.dtype
        return "float32" if self.keeps(tensor, target) else target

    def keeps(self, tensor: StaticTensor, target: str) -> bool:
        """Whether the class keeps a tensor in float32 when loaded in ``target``: one list is for float16 only."""
        parts = list(self.keep_in_fp32.get("_keep_in_fp32_modules_strict", ())) if target in HALF else []
        if target == "float16":
            parts += self.keep_in_fp32.get("_keep_in_fp32_modules", ())
        return any(_named(part, tensor.name) for part in parts)


def plain_dtype(value: Any) -> str | None:
    """A dtype as a config may give it (``torch.float16``, ``float16``, ``auto``), without the prefix; None for no dtype."""
    text = value.removeprefix("torch.") if isinstance(value, str) else ""
    return text if text in FLOATS else None


def _named(part: str, name: str) -> bool:
    return f".{part}." in f".{name}." or name.startswith(f"{part}.")


def noted(name: str, trace: Trace, intent: Intent) -> Subject:
    """The parameters and buffers of the first model in ``trace``, in the dtypes that they have in memory."""
    notes = {note.name: note for note in trace.all(ParameterNote) if note.root == 0}
    return Subject(
        name=name,
        tensors=tuple(
            StaticTensor(name=note.name, dtype=note.dtype, shape=tuple(note.shape), trainable=_trainable(note))
            for note in notes.values()
        ),
        quant_states=tuple(
            QuantState(
                weight=note.name,
                kind=str(note.quant["kind"]),
                dtype=str(note.quant["dtype"]),
                compute_dtype=note.quant.get("compute_dtype"),
                nested=bool(note.quant.get("nested")),
            )
            for note in notes.values()
            if note.quant is not None
        ),
        loaded=True,
        intent=intent,
    )


def _trainable(note: ParameterNote) -> bool:
    return note.requires_grad and not note.buffer
