"""An independent witness for the script corpus: which op raised, and where the first non-finite value came from.

It shares nothing with the package under test. Two torch modes and a few global hooks are enough, because it may be slow:
it looks at every element of every operand of every op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

FROM_ELSEWHERE = ("aten.empty", "aten.new_empty", "aten.resize_", "aten.set_.")
"""Ops whose result is memory that no op has computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Witnessed:
    """One thing that was seen.

    ``kind`` is ``birth`` (an op made NaN out of none, or inf out of finite numbers), ``input`` (a root module was given
    a non-finite tensor), ``parameters`` (a root module held one before it was called), ``consumed`` (before all of these,
    an op that is no view was given NaN and passed it on) or ``raised``. ``fqn`` is relative
    to the outermost module, None outside every module. ``step`` is the number of optimizer steps done plus one,
    ``call`` the number of the outermost module call. ``in_float32`` says for a birth whether the same op on the same
    operands, widened to float32, is finite.
    """

    kind: str
    op: str | None
    fqn: str | None
    phase: str
    step: int
    call: int
    in_float32: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a witness tells at the end: its records in order, and which op ran directly in which module's forward."""

    records: tuple[Witnessed, ...]
    ran: frozenset[tuple[str, str]]

    def first(self, *kinds: str) -> Witnessed | None:
        return next((record for record in self.records if record.kind in kinds), None)


class Place:
    """Where the program is: open modules, backward node, optimizer, ``generate``."""

    def __init__(self) -> None:
        self.open: list[tuple[str, int]] = []
        self.names: dict[int, str] = {}
        self.steps_done = 0
        self.calls = 0
        self.stepping = False
        self.generating = 0
        self.ranges: list[tuple[int, int, str]] = []

    def enter(self, module: torch.nn.Module) -> bool:
        """Open ``module``; says whether it is outermost outside a backward pass."""
        outermost = not self.open
        if outermost and not in_backward():
            self.names = {id(child): name for name, child in module.named_modules()}
            self.calls += 1
        self.open.append((self.names.get(id(module), ""), next_sequence_number()))
        return outermost and not in_backward()

    def leave(self) -> None:
        """Close the innermost module and remember which autograd nodes it made."""
        name, first = self.open.pop()
        self.ranges.append((first, next_sequence_number(), name))

    @property
    def phase(self) -> str:
        """Name of the phase, from the facts at hand."""
        if self.stepping:
            return "optimizer"
        if in_backward():
            return "recompute" if self.open else "backward"
        return "generate" if self.generating else "forward"

    @property
    def fqn(self) -> str | None:
        """Innermost open module, or in the backward pass the one whose forward made the node at work."""
        if self.open:
            return self.open[-1][0]
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        number = node._sequence_nr()
        holding = [(last - first, name) for first, last, name in self.ranges if first <= number < last]
        return min(holding)[1] if holding else None


def in_backward() -> bool:
    """Whether the autograd engine is running a node in this thread."""
    return torch._C._current_autograd_node() is not None


def next_sequence_number() -> int:
    """Number that the next autograd node made in this thread will get."""
    return int(torch._C._autograd._get_sequence_nr())


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Floating-point tensors anywhere in ``tree``; subclasses such as DTensor are left alone."""
    plain = (torch.Tensor, torch.nn.Parameter)
    return [leaf for leaf in tree_leaves(tree) if type(leaf) in plain and leaf.is_floating_point()]


def nan_and_inf(tensors: Sequence[torch.Tensor]) -> tuple[bool, bool]:
    """Whether any element is NaN, and whether any is infinite."""
    dense = [tensor.detach() for tensor in tensors if tensor.layout == torch.strided and not tensor.is_meta]
    dense = [t.float() if t.is_floating_point() and t.itemsize == 1 else t for t in dense]  # float8 knows no isinf
    return any(bool(t.isnan().any()) for t in dense), any(bool(t.isinf().any()) for t in dense)


def asks_for_nonfinite(tree: Any) -> bool:
    """Whether a plain number among the arguments is itself NaN or infinite, as in a mask fill."""
    return any(isinstance(leaf, float) and not math.isfinite(leaf) for leaf in tree_leaves(tree))


def is_view(func: Any) -> bool:
    """Whether the result of ``func`` shares memory with an operand that it leaves unchanged."""
    return any(result.alias_info is not None and not result.alias_info.is_write for result in func._schema.returns)


def widened(leaf: Any) -> Any:
    """A float32 copy of a narrower tensor, float32 for a narrower dtype, anything else as it is (tensors copied)."""
    if isinstance(leaf, torch.dtype):
        return torch.float32 if leaf in (torch.float16, torch.bfloat16) else leaf
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.float() if leaf.dtype in (torch.float16, torch.bfloat16) else leaf.clone()


def finite_when_run(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether ``func`` on these operands gives only finite numbers."""
    return not any(nan_and_inf(tensors_in(func(*args, **kwargs))))


class Witness:
    """Collects what is seen."""

    def __init__(self) -> None:
        self.place = Place()
        self.seen: list[Witnessed] = []
        self.ran: set[tuple[str, str]] = set()

    def note(self, kind: str, op: str | None, **details: Any) -> None:
        """Record something happening here and now; ``details`` are further or other fields of the record."""
        place = self.place
        fields = {"fqn": place.fqn, "phase": place.phase, "step": place.steps_done + 1, "call": max(place.calls, 1)}
        self.seen.append(Witnessed(kind=kind, op=op, **(fields | details)))

    def account(self) -> Account:
        """All that was seen. A program that never finished an optimizer step counts its calls as steps."""
        if self.place.steps_done:
            records = tuple(self.seen)
        else:
            records = tuple(replace(record, step=record.call) for record in self.seen)
        return Account(records=records, ran=frozenset(self.ran))

    def before_module(self, module: torch.nn.Module, args: Any) -> None:
        """Global forward pre-hook."""
        if not self.place.enter(module):
            return
        with torch._C._DisableTorchDispatch():
            bad = next((name for name, p in module.named_parameters() if any(nan_and_inf(tensors_in(p)))), None)
            if bad is not None:
                self.note("parameters", None, fqn=bad.rpartition(".")[0])
            if any(nan_and_inf(tensors_in(args))):
                self.note("input", None)

    def run_op(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one aten op and judge it."""
        nan_before, inf_before = nan_and_inf(tensors_in((args, kwargs)))
        wide = None if nan_before or inf_before else tree_map(widened, (args, kwargs))
        try:
            out = func(*args, **kwargs)
        except Exception:
            self.note("raised", str(func))
            raise
        if self.place.open:
            self.ran.add((str(func), self.place.open[-1][0]))
        if str(func).startswith(FROM_ELSEWHERE):
            return out
        nan_after, inf_after = nan_and_inf(tensors_in(out))
        new_inf = inf_after and not (inf_before or nan_before or asks_for_nonfinite((args, kwargs)))
        if (nan_after and not nan_before) or new_inf:
            self.note("birth", str(func), in_float32=wide and finite_when_run(func, *wide))
        elif nan_before and nan_after and not self.seen and not is_view(func):
            self.note("consumed", str(func))
        return out


class OpMode(TorchDispatchMode):
    """Shows each aten op to the witness, in forward and backward."""

    def __init__(self, witness: Witness) -> None:
        super().__init__()
        self.witness = witness

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.witness.run_op(func, args, kwargs or {})


class FunctionMode(TorchFunctionMode):
    """Notes a torch function that raised above the dispatcher, where no aten op is ever reached."""

    def __init__(self, witness: Witness) -> None:
        super().__init__()
        self.witness = witness

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.witness.note("raised", getattr(func, "__name__", str(func)))
            raise


@contextmanager
def counted(owner: type, method: str, place: Place) -> Iterator[None]:
    """Count how deep the program is inside ``owner.method``."""
    original: Callable[..., Any] = getattr(owner, method)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        place.generating += 1
        try:
            return original(*args, **kwargs)
        finally:
            place.generating -= 1

    setattr(owner, method, wrapped)
    try:
        yield
    finally:
        setattr(owner, method, original)


@contextmanager
def watching(generation_owner: type | None = None) -> Iterator[Witness]:
    """Watch everything that this thread does; ``generation_owner`` is the class whose ``generate`` is that phase."""
    witness = Witness()
    place = witness.place

    def starts(*_: Any) -> None:
        place.stepping = True

    def ends(*_: Any) -> None:
        place.stepping = False
        place.steps_done += 1

    with ExitStack() as stack:
        for handle in (
            register_module_forward_pre_hook(witness.before_module),
            register_module_forward_hook(lambda *_: place.leave(), always_call=True),
            register_optimizer_step_pre_hook(starts),
            register_optimizer_step_post_hook(ends),
        ):
            stack.callback(handle.remove)
        if generation_owner is not None:
            stack.enter_context(counted(generation_owner, "generate", place))
        stack.enter_context(FunctionMode(witness))
        stack.enter_context(OpMode(witness))
        yield witness
