"""How places and measurements are said in findings."""

import re
from collections.abc import Sequence
from math import prod

from dtypedoctor.dtypes import DTYPES
from dtypedoctor.trace.events import Op, Raised, TensorNote
from dtypedoctor.trace.model import Trace

OUTSIDE = -1
"""``Op.root`` of an op that ran outside of every module call."""


def short(fqn: str | None) -> str:
    """The tail of a dotted name that a person recognizes."""
    if fqn is None:
        return "the code outside of all modules"
    if fqn.isdigit():
        return f"model[{fqn}]"
    return ".".join(fqn.split(".")[-3:]) or "the outermost module"


def named_module(fqn: str | None) -> str:
    """A dotted name in a list of modules, where the outermost one's would be empty."""
    return fqn or "(the outermost module)"


def short_parameter(name: str) -> str:
    """The name of a parameter behind the tail of its module's that a person recognizes."""
    module, _, own = name.rpartition(".")
    return f"{short(module)}.{own}" if module else own


def place(op: Op) -> str | None:
    """Dotted name of the module that ``op`` ran in: empty for the outermost one, None outside of all."""
    return None if op.root == OUTSIDE else op.fqn


def differentiated(op: Op) -> str | None:
    """The operator that a backward op differentiates, as far as its autograd node says it: ``sqrt`` for ``SqrtBackward0``."""
    name, found, _ = (op.node or "").partition("Backward")
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name.rpartition("::")[2]).lower() if found and name else None


def module_of(parameter: str) -> str:
    """Dotted name of the module that holds ``parameter``."""
    return parameter.rpartition(".")[0]


def limit_of(dtype: str) -> float:
    """Largest finite value of ``dtype``; inf where it is not a floating-point format."""
    known = DTYPES.get(dtype)
    return known.max if known is not None else float("inf")


def number(value: float) -> str:
    """A magnitude as people read it: ``84,628``, ``318.8``, ``3.4e38``."""
    if 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:.2g}".replace("e+", "e")


def max_of(dtype: str) -> str:
    """The largest finite value of ``dtype``, in words: ``float16 max is 65,504``."""
    return f"{dtype} max is {number(limit_of(dtype))}"


def magnitudes(op: Op) -> str:
    """The largest magnitudes of an op's operands, e.g. ``318.8 and 333.2``."""
    return " and ".join(number(t.absmax) for t in op.inputs if t.absmax is not None) or "unknown"


def bad_elements(tensor: TensorNote) -> str:
    """How many elements of a tensor are not finite, in words."""
    count = tensor.num_nan + tensor.num_posinf + tensor.num_neginf
    return f"{count} of {prod(tensor.shape)} elements"


def listed(names: Sequence[str], shown: int = 3) -> str:
    """Names in a sentence, the rest of a long list counted."""
    more = len(names) - shown
    return ", ".join(names[:shown]) + (f" and {more} more" if more > 0 else "")


def how_the_run_ended(trace: Trace) -> tuple[str, ...]:
    """The exception that ended the run, as a piece of evidence; empty where there was none."""
    raised = trace.last(Raised)
    if raised is None:
        return ()
    first_line = raised.message.splitlines()[0] if raised.message else ""
    if raised.caught:
        when = f"{trace.moment(raised.step)} ({raised.phase})"
        return (f"{raised.type} was raised in {when} and was caught by the program: {first_line[:200]}",)
    return (f"The run ended in {trace.moment(raised.step)} ({raised.phase}) with {raised.type}: {first_line[:200]}",)


def failing_line(raised: Raised) -> str | None:
    """``package/file.py:line`` of the innermost frame that computes: neither torch's nor one that watches or counts its calls."""
    between = ("/torch/", "/dtypedoctor/instrument/", "/dtypedoctor/corrections/")
    computing = [frame for frame in _at_work(raised) if not any(part in frame for part in between)]
    return _line(computing[-1]) if computing else None


def raising_line(raised: Raised) -> str | None:
    """``package/file.py:line`` of the innermost frame outside of torch and of the doctor; None where there is none."""
    outside = [frame for frame in _at_work(raised) if "/torch/" not in frame and "/dtypedoctor/" not in frame]
    return _line(outside[-1]) if outside else None


def _line(frame: str) -> str:
    """The place of a frame, its path from the top of an installed package on; of other code the file's name."""
    at, _, _ = frame.rpartition(" ")
    _, found, rest = at.rpartition("/dtypedoctor/")
    if found:
        return f"dtypedoctor/{rest}"
    _, installed, rest = at.rpartition("/site-packages/")
    return rest if installed else at.rpartition("/")[-1]


def _at_work(raised: Raised) -> list[str]:
    """The frames without those that only hand on what somebody else computes with a subclass of tensors."""
    return [frame for frame in raised.frames if not frame.endswith((" __torch_function__", " __torch_dispatch__"))]


def class_of(trace: Trace, fqn: str) -> str:
    """Class name of the module ``fqn``, or an empty string."""
    return next((s.cls for s in trace.sites.values() if s.fqn == fqn and s.cls), "")


OWN_WORKLOADS = "dtypedoctor/workloads/"
"""Where the source lines begin that do what a scenario asks for."""
