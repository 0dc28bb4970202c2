"""What the instruments tell of torch.compile, and of kernels on CUDA streams."""

from typing import Any

from traces import TraceBuilder

from dtypedoctor.trace.events import Observation, ParameterNote

BREAK = {
    "kind": "Unsupported method call",
    "explanation": "Dynamo does not know how to trace method `__call__` of class `_FuncPtr`",
    "context": "call_method UserDefinedObjectVariable(_FuncPtr) __call__",
    "frames": ["/home/me/model.py:40 forward", "/home/me/kernel.py:7 dequantize"],
    "count": 12,
}
PRINT = BREAK | {
    "explanation": "Dynamo cannot trace print",
    "context": "print",
    "frames": ["/home/me/model.py:41 forward"],
    "count": 1,
}
LIMIT = {
    "limit": "recompile_limit",
    "value": 8,
    "function": "torch_dynamo_resume_in_forward_at_40",
    "place": "/home/me/model.py:40",
    "guard": "tensor 'A' dtype mismatch. expected Float, actual Byte",
}
RECOMPILE = {
    "function": "get_ptr",
    "place": "/site-packages/bitsandbytes/functional.py:405",
    "count": 5,
    "guards": [
        "tensor 'A' size mismatch at index 0. expected 64, actual 32. Guard failed on a parameter, consider …",
        "x == 3   # if x:",
    ],
}
UNSUPPORTED = """Unsupported method call
  Explanation: Dynamo does not know how to trace method `__new__` of class `PyCSimpleType`
  Hint: Avoid calling `PyCSimpleType.__new__` in your code.

from user code:
   File "/home/me/model.py", line 130, in forward
    x = layer(x)
  File "/site-packages/torch/nn/modules/module.py", line 1778, in _wrapped_call_impl
    return self._call_impl(*args, **kwargs)
"""


def trace(*kinds: tuple[str, dict[str, Any]], packed: bool = True) -> TraceBuilder:
    built = TraceBuilder()
    if packed:
        built.add(ParameterNote(n=built.n(), root=0, name="w", dtype="uint8", shape=[8, 1], quant={"kind": "nf4"}))
    for kind, values in kinds:
        built.add(Observation(n=built.n(), step=1, call=1, phase="compile", kind=kind, values=values))
    return built


COUNTS = (
    "compile",
    {"breaks": 13, "unique_graphs": 9, "frames": 20, "frames_compiled": 20, "recompiles": 5, "limit_hits": 1},
)


def launches(*uses: tuple[int, int, int]) -> TraceBuilder:
    built = TraceBuilder()
    for used, current, count in uses:
        values = {"device": "cuda:0", "used": used, "current": current, "count": count, "stale": used != current}
        built.add(Observation(n=built.n(), step=2, call=3, phase="forward", kind="cuda-stream", values=values))
    return built
