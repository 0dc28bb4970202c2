"""What models say about their own dtypes: configurations, lists of modules to keep in float32, shard units."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dtypedoctor.instrument.naming import Names, dtype_name, quantization_of
from dtypedoctor.instrument.observing import observe
from dtypedoctor.instrument.position import Position
from dtypedoctor.instrument.sharding import shard_units
from dtypedoctor.instrument.weights import packed_attributes
from dtypedoctor.trace.events import ParameterNote
from dtypedoctor.trace.records.models import ModelConfig
from dtypedoctor.trace.writer import TraceWriter

Fact = tuple[str, str, dict[str, Any]]
"""Kind, dotted name of the module, values."""

_KEEP_LISTS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


class ModelFacts:
    """Writes, when an outermost module is first called, each :class:`ModelConfig` and :class:`ShardUnit` of it and the modules inside it."""

    def __init__(self, writer: TraceWriter, position: Position, names: Names) -> None:
        self._writer = writer
        self._position = position
        self._names = names
        self._told: set[int] = set()

    def tell(self, module: nn.Module) -> None:
        """An outermost module is called."""
        place = self._names.find(module)
        if place is None or place[0] in self._told:
            return
        root, prefix = place
        self._told.add(root)
        self._note_packed(module, root)
        for name, fact in (*_configurations(module, root), *shard_units(module, root)):
            fqn = ".".join(part for part in (prefix, name) if part)
            observe(self._writer, self._position, fact, fqn=fqn)

    def _note_packed(self, module: nn.Module, root: int) -> None:
        """Notes packed weights that no parameter holds as if one did."""
        for child in module.modules():
            fqn = (self._names.find(child) or (root, ""))[1]
            for name, weight, state in packed_attributes(child):
                self._writer.write(
                    ParameterNote(
                        n=self._writer.next_n(),
                        root=root,
                        name=f"{fqn}.{name}",
                        dtype=dtype_name(weight),
                        shape=list(weight.shape),
                        owner=type(child).__name__,
                        quant=quantization_of(weight, child, state),
                    )
                )


def _configurations(module: nn.Module, root: int) -> Iterator[tuple[str, ModelConfig]]:
    for name, child in module.named_modules():
        kept = _kept_in_float32(child)
        dtype = _configured_dtype(child) if not name or kept else None
        if kept or dtype:
            yield name, ModelConfig(root=root, dtype=dtype, keep_in_fp32=kept)


def _kept_in_float32(module: nn.Module) -> list[str]:
    return sorted({str(entry) for attribute in _KEEP_LISTS for entry in getattr(module, attribute, None) or ()})


def _configured_dtype(module: nn.Module) -> str | None:
    config = getattr(module, "config", None)
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return str(dtype).removeprefix("torch.") if isinstance(dtype, (str, torch.dtype)) else None
