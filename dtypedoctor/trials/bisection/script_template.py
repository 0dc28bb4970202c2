"""What every reproduction script has in common; braces that stay in it are doubled, for ``str.format``.

Its first lines are fixed: a comment there could choose another encoding of the file, in which what follows means something else.
"""

TEMPLATE = '''"""One call of a module that fails by itself: it needs torch and the library of the module, nothing else.

Run:     python repro.py
Expect:  a line that begins with FAILS, and exit status 1. Exit status 0 means that it is fixed.
"""

{about}

import importlib
import json
import sys
import types
from contextlib import ExitStack
from pathlib import Path

import torch

CHECK = {check!r}
LIMIT = {limit!r}  # of the relative error, where accuracy is checked
AUTOCAST = {autocast!r}
HALF = (torch.float16, torch.bfloat16)
WIDE = []  # holds something while the call is made in float32
LEFT = []  # what has left the module, in order: to the modules in it, and as its output
RETURNED = []  # what the modules in it are going to return


def module(T):
    """The module, with its weights."""
    return {module}


CALLS = [  # what the modules in it returned, in order
{calls}
]
GRADIENTS = {{  # of what has left the module
{gradients}
}}


def call(T):
    """The call that failed."""
    return module(T)({arguments})


class Ended(Exception):
    """The next thing that comes into the module was a consequence of the failure."""


class Recorded(torch.nn.Module):
    """Stands for a module inside: takes note of what it is given, and returns what the real one returned."""

    def forward(self, *args, **kwargs):
        name, result = RETURNED.pop(0) if RETURNED else ("the next one", None)
        LEFT.append((f"what {{name}} is given", list(tensors((args, kwargs)))))
        if result is None or any(bad(tensor) for tensor in tensors(result)):
            raise Ended
        return result


def made(cls, attributes, parameters={{}}, buffers={{}}, children={{}}, forward=None):
    """An instance of a module class, without calling its constructor."""
    instance = found(cls).__new__(found(cls))
    torch.nn.Module.__init__(instance)
    vars(instance).update(attributes)
    for name, value in parameters.items():
        if value is not None and not hasattr(value, "quant_state"):
            value = torch.nn.Parameter(value, requires_grad=value.is_floating_point())
        instance.register_parameter(name, value)
    for name, value in buffers.items():
        instance.register_buffer(name, value)
    for name, child in children.items():
        instance.add_module(name, child)
    if hasattr(instance, "_init_flat_weights"):  # recurrent modules of torch hold their weights twice
        instance._init_flat_weights()
    if forward is not None:
        instance.forward = types.MethodType(found(forward), instance)
    return instance


def found(name):
    module_name, _, path = name.partition(":")
    thing = importlib.import_module(module_name)
    for part in path.split("."):
        thing = getattr(thing, part)
    return thing


def configured(cls, values, chosen):
    config = found(cls).from_dict(values)
    for name, value in chosen.items():
        if value is not None:
            setattr(config, name, value)
    return config


def holding(cls, values):
    """An object of a class, with what it held."""
    instance = found(cls).__new__(found(cls))
    vars(instance).update(values)
    return instance


def packed(data, state):
    """A 4-bit weight of bitsandbytes; in float32 its codes stay what they are."""
    weight = found("bitsandbytes.nn:Params4bit").from_prequantized(data, state, device="cpu")
    weight.quant_state.dtype = dtype(str(weight.quant_state.dtype).removeprefix("torch."))
    return weight


def dtype(name):
    """A dtype that the module or its caller named; float32 stands for the narrow ones while the call is made in it."""
    named = getattr(torch, name)
    return torch.float32 if WIDE and named in HALF else named


def tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors(item)
    elif hasattr(value, "values") or isinstance(value, types.SimpleNamespace):
        for item in (vars(value) if isinstance(value, types.SimpleNamespace) else value).values():
            yield from tensors(item)


def load(path):
    """Reads a safetensors file: eight bytes with the length of a JSON header, the header, the data."""
    dtypes = {{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
              "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}}
    data = bytearray(path.read_bytes())
    length = int.from_bytes(data[:8], "little")
    read = {{}}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            flat = torch.frombuffer(data[begin:end], dtype=dtypes[entry["dtype"]]) if end > begin else torch.empty(0)
            read[name] = flat.to(dtypes[entry["dtype"]]).reshape(entry["shape"]).clone()
    return read


def bad(tensor):
    return int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0


def largest(tensor):
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def attempt(wide):
    """Makes the call; in float32 with ``wide``. What has left the module, and what it raised."""
    T = load(Path(__file__).with_name("repro.safetensors"))
    WIDE[:] = [wide] if wide else []
    if wide:
        T = {{name: t.float() if t.dtype in HALF and ".packed" not in name else t for name, t in T.items()}}
    if CHECK == "backward":
        fixed = [name for name, t in T.items() if not t.is_floating_point() or "gradient" in name or ".packed" in name]
        T = {{name: t if name in fixed else t.requires_grad_() for name, t in T.items()}}
    LEFT.clear()
    RETURNED[:] = [(name, result(T)) for name, result in CALLS]
    raised = None
    with ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled({grad}))
        for device, dtype in [] if wide else AUTOCAST:
            stack.enter_context(torch.autocast(device, dtype=getattr(torch, dtype)))
        try:
            LEFT.append(("the output", list(tensors(call(T)))))
        except Ended:
            pass
        except RuntimeError as error:
            raised = error
    return (gradients(T) if CHECK == "backward" else list(LEFT)), raised


def gradients(T):
    """Goes back with the recorded gradients: what comes out at the inputs and weights."""
    ends = [(LEFT[place][1][index], T[key]) for (place, index), key in GRADIENTS.items() if place < len(LEFT)]
    ends = [(tensor, gradient.to(tensor.dtype)) for tensor, gradient in ends if tensor.requires_grad]
    torch.autograd.backward([tensor for tensor, _ in ends], [gradient for _, gradient in ends])
    return [(f"the gradient of {{name}}", [t.grad]) for name, t in T.items() if t.is_leaf and t.grad is not None]


def main():
    print(f"torch {{torch.__version__}}")
    (narrow, raised), (wide, raised_wide) = attempt(False), attempt(True)
    if raised_wide is not None:
        return done(2, f"float32 raises too: {{raised_wide}}")
    if CHECK == "dtype" or raised is not None:
        return done(1, f"FAILS: {{raised}} (in float32 nothing is raised)") if raised else done(0, "nothing is raised")
    for (what, given), (_, exact) in zip(narrow, wide):
        for tensor, reference in zip(given, exact):
            if not tensor.is_floating_point():
                continue
            count = bad(tensor)
            print(f"{{what}}: {{tensor.dtype}}, largest finite {{largest(tensor):g}}, {{count}} not finite; in float32 {{largest(reference):g}}")
            if bad(reference):
                return done(2, f"{{what}} is not finite in float32 either")
            if CHECK != "accuracy" and count:
                return done(1, f"FAILS: {{what}}: {{count}} of {{tensor.numel()}} elements are inf or NaN in {{tensor.dtype}}")
            error = float((tensor.float() - reference).norm() / reference.norm().clamp_min(1e-30))
            if CHECK == "accuracy" and error > LIMIT:
                return done(1, f"FAILS: {{what}} has a relative error of {{error:.3g}} against float32")
    return done(0, "everything is as it should be")


def done(status, sentence):
    print(sentence)
    return status


if __name__ == "__main__":
    sys.exit(main())
'''
