"""What is known of a model before it runs, and reading it from a checkpoint: headers, config, quantization states. No weights are loaded.

Where the files come from: a folder, or the hub's cache of downloads, without the network. What the model's class keeps in float32 is read from the
class's source without importing it.
"""

import ast
import os
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

from dtypedoctor.dtypes import HALF
from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import parse_json, read_file, reason
from dtypedoctor.tensor_files import DTYPES, Entry, read_entries
from dtypedoctor.text import memory
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
        return prod(self.shape)


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
        partial: whether weights are missing: no file has any, one that the index names is not there, or ends before they do. Headers alone say what the dtypes are.
        outside_float16: by tensor, where the weights are to be loaded in float16, how many of its elements become inf, how many 0, and how
            many are inf or NaN already; tensors of which none does or is are left out.
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
    partial: bool = False
    outside_float16: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)

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
        return any(f".{part}." in f".{tensor.name}." or tensor.name.startswith(f"{part}.") for part in parts)


def plain_dtype(value: Any) -> str | None:
    """A dtype as a config may give it (``torch.float16``, ``float16``, ``auto``), without the prefix; None for no dtype."""
    text = value.removeprefix("torch.") if isinstance(value, str) else ""
    return text if text in FLOATS else None


def noted(name: str, trace: Trace, intent: Intent) -> Subject:
    """The parameters and buffers of the first model in ``trace``, in the dtypes that they have in memory."""
    notes = {note.name: note for note in trace.all(ParameterNote) if note.root == 0}
    return Subject(
        name=name,
        tensors=tuple(
            StaticTensor(
                name=note.name,
                dtype=note.dtype,
                shape=tuple(note.shape),
                trainable=note.requires_grad and not note.buffer,
            )
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


def cached(model_id: str) -> Path | None:
    """The folder of the newest snapshot of ``organisation/name`` (``main`` where there is one); None if it is not there."""
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    model = hub / f"models--{model_id.replace('/', '--')}"
    if not os.path.isdir(model):  # also where the name is longer than that of any file
        return None
    main = model / "refs" / "main"
    if main.is_file():
        snapshot = model / "snapshots" / main.read_text(encoding="utf-8").strip()
        if snapshot.is_dir():
            return snapshot
    snapshots = sorted((model / "snapshots").glob("*/"), key=lambda path: path.stat().st_mtime)
    return snapshots[-1] if snapshots else None


LISTS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
"""Class attributes of transformers' models: what stays float32 when loaded as float16, and what stays so in any dtype."""


def kept_in_float32(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """The lists of the classes that the installed transformers has for ``config["model_type"]``; empty without any.

    The lists of all classes in the model's file are joined, since a model is made of several of them.
    """
    kind, package = config.get("model_type"), find_spec("transformers")
    if not (isinstance(kind, str) and kind.isidentifier()) or package is None or package.origin is None:
        return {}
    source = Path(package.origin).parent / "models" / kind / f"modeling_{kind}.py"
    return _lists(source) if source.is_file() else {}


@cache
def _lists(source: Path) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        for statement in node.body if isinstance(node, ast.ClassDef) else ():
            name = ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
            if name in LISTS and isinstance(statement, ast.Assign):
                found.setdefault(name, []).extend(_texts(statement.value))
    return {name: tuple(dict.fromkeys(values)) for name, values in found.items() if values}


def _texts(value: ast.expr) -> list[str]:
    """The texts in a list, tuple or set of the source; empty for anything else."""
    elements = value.elts if isinstance(value, ast.List | ast.Set | ast.Tuple) else []
    return [one.value for one in elements if isinstance(one, ast.Constant) and isinstance(one.value, str)]


CONFIG, ADAPTER, INDEX = "config.json", "adapter_config.json", "model.safetensors.index.json"
STATE = ".quant_state.bitsandbytes__"
STATE_PARTS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
FREQUENCIES = "inv_freq"
LARGEST_READ = 4 << 30
"""Bytes of weights that are read to see what another dtype makes of them."""
LARGEST_TABLE = 65_536
"""Bytes of a table of frequencies that is worth reading."""


def is_checkpoint(path: Path) -> bool:
    """Whether there is anything that :func:`read_checkpoint` can read."""
    if path.is_dir():
        return any((path / name).is_file() for name in (CONFIG, ADAPTER)) or any(path.glob("*.safetensors"))
    return path.suffix == ".safetensors" and path.is_file()


def read_checkpoint(path: Path, intent: Intent | None = None) -> Subject:
    """What the files in ``path`` say.

    Raises:
        UsageError: there is no checkpoint, or one of its files cannot be read.
    """
    if not is_checkpoint(path):
        raise UsageError(
            f"{path}: no checkpoint here", "Give a folder with config.json and *.safetensors files, or one such file."
        )
    folder = path if path.is_dir() else path.parent
    files = sorted(folder.glob("*.safetensors")) if path.is_dir() else [path]
    entries = [entry for file in files for entry in read_entries(file)]
    config = _json(folder / CONFIG)
    quantized = {entry.name.partition(STATE)[0] for entry in entries if STATE in entry.name}
    parts = {f"{name}{part}" for name in quantized for part in STATE_PARTS}
    wide = [entry for entry in entries if entry.dtype in ("bfloat16", "float32") and entry.is_whole and not entry.cut]
    read = _first(wide, LARGEST_READ) if intent is not None and intent.dtype == "float16" else []
    unread = f"values of {len(wide) - len(read)} tensors: {memory(LARGEST_READ)} of weights are read at most"
    counts = {entry.name: entry.outside_float16() for entry in read}
    strange = sorted({entry.dtype for entry in entries} - set(DTYPES.values()))
    missing = sorted(_shards(folder / INDEX) - {file.name for file in files})
    return Subject(
        name=str(path),
        tensors=tuple(_tensor(entry) for entry in entries if STATE not in entry.name and entry.name not in parts),
        quant_states=tuple(_quant_states(entries)),
        config=config,
        adapter=_json(folder / ADAPTER) if (folder / ADAPTER).is_file() else None,
        keep_in_fp32=kept_in_float32(config),
        intent=intent or Intent(),
        gaps=(
            *_gaps(folder, files, missing),
            *_cut(entries),
            *([unread] if read and len(read) < len(wide) else []),
            *(f"tensors in {dtype}, which is not known here" for dtype in strange),
        ),
        partial=not entries or bool(missing) or any(entry.cut for entry in entries),
        outside_float16={name: count for name, count in counts.items() if any(count)},
    )


def _first(entries: list[Entry], most: int) -> list[Entry]:
    """The first entries that take no more bytes together."""
    ends = accumulate(entry.end - entry.begin for entry in entries)
    return [entry for entry, end in zip(entries, ends, strict=True) if end <= most]


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = parse_json(read_file(path, follow=True))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read ({reason(error)})", "Download it again.") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: holds no settings")
    return value


def _tensor(entry: Entry) -> StaticTensor:
    small = entry.end - entry.begin <= LARGEST_TABLE
    table = small and entry.dtype == "float32" and entry.name.endswith(FREQUENCIES)
    try:
        values = struct.unpack(f"<{(entry.end - entry.begin) // 4}f", entry.read()) if table else ()
    except (OSError, ValueError, struct.error) as error:
        raise UsageError(f"{entry.file}: {entry.name} is no table of float32 ({reason(error)})") from error
    return StaticTensor(name=entry.name, dtype=entry.dtype, shape=entry.shape, values=values)


def _quant_states(entries: list[Entry]) -> Iterator[QuantState]:
    """bitsandbytes stores each state as JSON in a tensor of bytes beside the packed weight."""
    for entry in entries:
        weight, mark, kind = entry.name.partition(STATE)
        if not mark:
            continue
        try:
            state = parse_json(entry.read())
            yield QuantState(
                weight=weight, kind=kind, dtype=str(state["dtype"]), nested="nested_dtype" in state
            )  # fmt: skip
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{entry.file}: {entry.name} is no quantization state ({reason(error)})") from error


def _shards(index: Path) -> set[str]:
    """The files that an index names; none where there is no index."""
    named = _json(index).get("weight_map", {})
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise UsageError(f"{index}: weight_map is no mapping of tensors to files", "Download it again.")
    return set(named.values())


def _cut(entries: list[Entry]) -> Iterator[str]:
    """A header is whole long before its file is: what it names says something, what is not there cannot be loaded."""
    for file in sorted({entry.file for entry in entries if entry.cut}):
        missing = [entry.name for entry in entries if entry.file == file and entry.cut]
        yield f"{file.name}: cut short, {len(missing)} of its tensors are not there, {missing[0][:100]} first"


def _gaps(folder: Path, files: list[Path], missing: list[str]) -> Iterator[str]:
    pickled = sorted(
        p.name for pattern in ("pytorch_model*.bin", "*.pt", "*.pth", "*.ckpt") for p in folder.glob(pattern)
    )
    if pickled:
        yield f"{', '.join(pickled[:3])}: a pickle, which is code and cannot be read without running it"
    if missing:
        yield f"{', '.join(missing[:3])}: named in the index and not there"
    if not files:
        yield "weights: there is no safetensors file"
    if not (folder / CONFIG).is_file() and not (folder / ADAPTER).is_file():
        yield f"{CONFIG}: not there, so what the files should hold is not known"
