"""The pictures of a report as the JSON that the page's script reads."""

import json
import math
from collections.abc import Sequence
from typing import Any

from dtypedoctor.dtypes import DTYPES
from dtypedoctor.report.model import Report
from dtypedoctor.report.picture import LANES, FlowLine, ModulePicture, OpLine, Picture, Series, TensorLine

__all__ = ["page_data"]

_LANE_TITLES = ("Forward", "Generate", "Backward", "Parameter gradients", "Parameters")


def page_data(report: Report) -> str:
    """JSON that may stand inside a ``script`` element: no character in it can end that element or begin another.

    Keys are short because they occur once per module; the script names them where it reads them.
    """
    facts = {
        "lanes": [[name, title] for name, title in zip(LANES, _LANE_TITLES, strict=True)],
        "dtypes": {d.name: {"short": d.short, "max": d.max, "tiny": d.tiny} for d in DTYPES.values()},
        "findings": [
            {
                "id": f.id,
                "fqn": f.fqn,
                "op": f.op,
                "phase": f.phase,
                "step": f.step,
                "source": f.source,
                "summary": f.summary,
            }
            for f in report.findings
        ],
    }
    runs = ",".join(_picture(picture) for picture in report.pictures)
    return _embeddable(f'{{"runs":[{runs}],{_dump(facts)[1:]}')


def _embeddable(text: str) -> str:
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _picture(picture: Picture) -> str:
    modules = ",".join(_module(module) for module in picture.modules)
    rest = {
        "label": picture.label,
        "columns": picture.columns,
        "notes": picture.notes,
        "ops": [_op(op) for op in picture.ops],
    }
    return f'{{"modules":[{modules}],{_dump(rest)[1:]}'


def _module(module: ModulePicture) -> str:
    series = ",".join(_series(series) for series in module.series)
    rest = {
        "r": module.root,
        "f": module.fqn,
        "c": module.cls,
        "t": [_tensor(tensor) for tensor in module.tensors],
        "w": [_flow(flow) for flow in module.flows],
    }
    return f'{{"s":[{series}],{_dump(rest)[1:]}'


def _series(series: Series) -> str:
    # Formatting by hand, to four digits, is five times faster than json and half as long. -1 stands for "not measured".
    numbers = ",".join(["-1" if math.isnan(value) else f"{value:.4g}" for value in series.absmax])
    bad = _dump({str(column): counts for column, counts in series.nonfinite.items()})
    return f"[{LANES.index(series.lane)},{_dump(series.dtype)},[{numbers}],{bad}]"


def _tensor(tensor: TensorLine) -> list[Any]:
    return [
        tensor.what,
        tensor.phase,
        tensor.dtype,
        tensor.shape,
        _rounded(tensor.absmax),
        tensor.num_nan,
        tensor.num_inf,
    ]


def _flow(flow: FlowLine) -> list[Any]:
    return [flow.phase, flow.step, flow.inputs, flow.weights, flow.outputs, flow.autocast, flow.why]


def _op(op: OpLine) -> list[Any]:
    return [op.fqn, op.phase, op.step, op.op, op.inputs, op.outputs, op.source, op.notes, int(op.born)]


def _rounded(value: float) -> float:
    return float(f"{value:.4g}") if math.isfinite(value) else 0.0


def _dump(value: dict[str, Any] | Sequence[Any] | str) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
