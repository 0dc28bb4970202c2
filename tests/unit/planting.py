"""Reports that carry a secret in every field."""

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from report_builders import mismatch, overflow

from dtypedoctor.report.model import FlowLine, ModulePicture, OpLine, Picture, Report, Series, TensorLine


def rich_report() -> Report:
    """A report with something in every field that formats show."""
    base = overflow()
    module = ModulePicture(
        root=0,
        fqn="model.layers.0.mlp",
        cls="MLP",
        series=(Series(lane="forward", dtype="float16", absmax=array("d", [1.0, 2.0]), nonfinite={1: (0, 3)}),),
        tensors=(TensorLine(what="output", phase="forward", dtype="float16", shape=(2, 3), absmax=2.0, num_nan=0, num_inf=3),),
        flows=(FlowLine(phase="forward", step=1, inputs=("float16",), weights=("float32",), outputs=("float32",),
                        autocast=None, why="promoted"),),
    )  # fmt: skip
    op = OpLine(fqn="model.layers.0.mlp", phase="forward", step=2, op="aten.mul.Tensor", inputs=("f16 2×3",), outputs=("f16 2×3",),
                source="modeling.py:3", notes=("in place",), born=True)  # fmt: skip
    return replace(
        base,
        findings=(*base.findings, *mismatch().findings),
        bisection={"culprits": ["model.layers.0"], "corrections": ["c"], "probes": 3, "one_minimal": True,
                   "verdicts": [{"mode": "m", "outcome": "fail", "phase": "forward", "fqn": "model", "absmax": 2.0}]},
        pictures=(Picture(label="before", columns=("1", "2"), modules=(module,), ops=(op,), notes=("a note",)),),
    )  # fmt: skip


def planted(value: Any, secret: str) -> Any:
    """``value`` with ``secret`` added to every text in it, keys included; enums and registered words stay."""
    if isinstance(value, Enum):
        return value
    if isinstance(value, str):
        return f"{value} {secret}"
    if is_dataclass(value) and not isinstance(value, type):
        keep = ("lane",)  # one of a closed set of words that the program itself writes
        changed = {f.name: planted(getattr(value, f.name), secret) for f in fields(value) if f.name not in keep}
        return replace(value, **changed)
    if isinstance(value, Mapping):
        return {planted(key, secret): planted(item, secret) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(planted(item, secret) for item in value)
    return value


def texts(value: Any) -> Iterator[str]:
    """Every text in ``value``, keys included."""
    if isinstance(value, str):
        yield value
    elif is_dataclass(value):
        for f in fields(value):
            yield from texts(getattr(value, f.name))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts(key)
            yield from texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts(item)
