"""What loading weights does to their dtypes: the file on one side, the model on the other.

Loading is a silent cast. ``load_state_dict`` copies into the tensors that are there, and ``from_pretrained`` decides by itself
where it is not told. The dtypes in a file are read from its header, without loading anything.
"""

import functools
import json
import math
import struct
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor.instrument.guard import Guard
from dtypedoctor.instrument.naming import dtype_name
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.silent.notes import Notes
from dtypedoctor.instrument.statistics import measurable

LONGEST_HEADER = 100_000_000
SAFETENSORS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
               "F8_E5M2": "float8_e5m2"}  # fmt: skip
"""Floating-point dtypes by their names in the safetensors format (https://github.com/huggingface/safetensors)."""
MOST_NAMED = 5


class LoadingCheck:
    """Follows ``load_state_dict`` and transformers' ``from_pretrained`` while started.

    * ``state-loaded``: ``casts`` (elements by ``FROM->TO``), ``became_inf`` and ``became_zero`` (elements that were finite, or
      not zero, before a cast to a smaller range), ``elements`` (that were cast to a smaller range) and ``names`` (a few of
      these tensors).
    * ``pretrained``: ``model`` (class), ``stored`` and ``loaded`` (elements by dtype), ``requested`` (dtype asked for or None).
    """

    def __init__(self, notes: Notes, position: Position, guard: Guard) -> None:
        self._notes = notes
        self._position = position
        self._guard = guard
        self._undo: list[Callable[[], None]] = []
        self._wrapped_pretrained = False

    def start(self) -> None:
        """Begins to follow."""
        original = nn.Module.load_state_dict
        note = self._guard.shield(self._note_state, "what load_state_dict has cast")

        @functools.wraps(original)
        def load_state_dict(module: nn.Module, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
            note(module, state_dict)
            return original(module, state_dict, *args, **kwargs)

        setattr(nn.Module, "load_state_dict", load_state_dict)  # noqa: B010  (mypy takes methods for fixed)
        self._undo.append(lambda: setattr(nn.Module, "load_state_dict", original))
        self.follow_pretrained()

    def stop(self) -> None:
        """Puts everything back as it was."""
        while self._undo:
            self._undo.pop()()
        self._wrapped_pretrained = False

    def follow_pretrained(self) -> None:
        """Wraps ``from_pretrained`` once transformers is there; cheap to call again."""
        owner = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
        if owner is None or self._wrapped_pretrained or not self._undo:
            return
        self._wrapped_pretrained = True
        original = owner.__dict__["from_pretrained"]
        function = original.__func__
        note = self._guard.shield(self._note_pretrained, "the dtypes of some checkpoints")

        @functools.wraps(function)
        def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
            result = function(cls, *args, **kwargs)
            note(result[0] if isinstance(result, tuple) else result, args, kwargs)
            return result

        owner.from_pretrained = classmethod(from_pretrained)
        self._undo.append(lambda: setattr(owner, "from_pretrained", original))

    def _note_state(self, module: nn.Module, state_dict: Mapping[str, Any]) -> None:
        own = {**dict(module.named_buffers()), **dict(module.named_parameters())}
        pairs = [(n, t, own[n]) for n, t in state_dict.items() if n in own and isinstance(t, Tensor)]
        cast = [(n, a, b) for n, a, b in pairs if measurable(a) and measurable(b) and a.dtype is not b.dtype]
        if not cast:
            return
        casts: Counter[str] = Counter()
        for _, a, b in cast:
            casts[f"{dtype_name(a)}->{dtype_name(b)}"] += a.numel()
        narrowed = [(n, a, b) for n, a, b in cast if torch.finfo(b.dtype).max < torch.finfo(a.dtype).max]
        with self._position.mute(), torch.no_grad():
            lost = [_lost(a, b.dtype) for _, a, b in narrowed]
        values = {
            "casts": dict(casts),
            "became_inf": sum(inf for inf, _ in lost),
            "became_zero": sum(zero for _, zero in lost),
            "elements": sum(a.numel() for _, a, _ in narrowed),
            "names": [n for n, _, _ in narrowed[:MOST_NAMED]],
        }
        self._notes.once("state-loaded", (type(module), *sorted(casts)), None, values)

    def _note_pretrained(self, model: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        stored = stored_dtypes(args[0] if args else kwargs.get("pretrained_model_name_or_path"), kwargs)
        loaded: Counter[str] = Counter()
        for parameter in model.parameters():
            if parameter.is_floating_point():
                loaded[dtype_name(parameter)] += parameter.numel()
        if not stored or not loaded:
            return
        requested = kwargs.get("dtype", kwargs.get("torch_dtype"))
        asked = str(requested).removeprefix("torch.") if requested not in (None, "auto") else None
        values = {"model": type(model).__name__, "stored": stored, "loaded": dict(loaded), "requested": asked}
        self._notes.once("pretrained", (type(model), *sorted(stored), *sorted(loaded)), None, values)


def _lost(tensor: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """How many elements a cast turns into inf, and how many into zero."""
    cast = tensor.detach().to(dtype)
    became_inf = cast.isinf() & tensor.isfinite()
    became_zero = cast.eq(0) & tensor.ne(0)
    inf, zero = torch.stack([became_inf.sum(), became_zero.sum()]).tolist()
    return int(inf), int(zero)


def stored_dtypes(name: Any, options: Mapping[str, Any]) -> dict[str, int]:
    """Elements by dtype in the safetensors files of a local folder or of the hub's cache; empty where there are none."""
    if name is None or options.get("subfolder") or options.get("state_dict") is not None:
        return {}
    folder = Path(str(name))
    if not folder.is_dir():
        cached = _cached(str(name), options.get("revision"))
        if cached is None:
            return {}
        folder = cached
    counts: Counter[str] = Counter()
    for file in sorted(folder.glob("*.safetensors")):
        counts.update(header_dtypes(file))
    return dict(counts)


def header_dtypes(file: Path) -> dict[str, int]:
    """Elements by floating-point dtype, from the header of a safetensors file: its length (8 bytes, little-endian), then JSON.

    Raises:
        ValueError: it is not such a file.
        OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        start = stream.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else LONGEST_HEADER + 1
        if length > LONGEST_HEADER:
            raise ValueError(f"{file}: not a safetensors file")
        header = json.loads(stream.read(length))
    counts: Counter[str] = Counter()
    for key, entry in header.items():
        if key != "__metadata__" and entry["dtype"] in SAFETENSORS:
            counts[SAFETENSORS[entry["dtype"]]] += math.prod(entry["shape"])
    return dict(counts)


def _cached(repository: str, revision: Any) -> Path | None:
    """The folder of a repository in the hub's cache, without asking the network."""
    hub = sys.modules.get("huggingface_hub")
    if hub is None:
        return None
    for name in ("model.safetensors", "model.safetensors.index.json"):
        found = hub.try_to_load_from_cache(repository, name, revision=revision)
        if isinstance(found, str):
            return Path(found).parent
    return None
