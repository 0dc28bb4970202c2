"""Tries fixes on the failing call of a replay, in the process that has just kept it as a capsule: what works is *fixed on this call*.

One call is made for each fix, with the fix in place, and one without it after that, which must fail as before: so nothing but the fix has made the
difference. The call is built from the files of the capsule once the program is over (:func:`try_on_capsules`), and shares nothing with it. What the capsule of a stranger
names is looked up before anything is made of it, and rejected where it is not what its name says.
"""

import importlib
import inspect
import linecache
import os
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import get_ident
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dtypedoctor._torch_private import OpOverload, schema_of
from dtypedoctor.corrections.contract import TargetMismatchError, put_in
from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import parse_json
from dtypedoctor.instrument.capsule import Kind, in_dtype, on_copies, signature
from dtypedoctor.instrument.capture import Operator
from dtypedoctor.instrument.live_call import AutocastState, LiveCall, RandomState, Settings, tensors_of
from dtypedoctor.instrument.statistics import is_finite
from dtypedoctor.instrument.untouched import as_before
from dtypedoctor.interruptions import contained
from dtypedoctor.plugins import Correction, registered
from dtypedoctor.redaction.messages import message_of
from dtypedoctor.replay.capsule import AGAIN, ALLOW_CODE, CAPSULE, CAPSULE_TENSORS, Capsule, Named, read_capsule
from dtypedoctor.replay.script import CannotBeWrittenError, capsule_script
from dtypedoctor.unpatched import process_time, to_json

_MACHINERY = frozenset({*dir(nn.Module), *vars(nn.Module()), "_init_flat_weights"}) - {"training"}
"""What every module has: with another forward, or a hook, an instance would do what its class does not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What the module of a capsule is called with.

    Attributes:
        args, kwargs: the arguments, on the module's device.
        grad: whether gradients are enabled.
        gradients: by index among the tensors that are returned, the gradient that comes back.
        random: state of the CPU's generator; None where nothing is drawn.
        settings: what torch is set to.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    gradients: dict[int, Tensor]
    random: Tensor | None
    settings: Settings


class Enclosing(nn.Module):
    """Stands for the modules around the one of the capsule, which so keeps its dotted name.

    Args:
        path: dotted name, of at least one part.
        module: what has this name.
    """

    def __init__(self, path: str, module: nn.Module) -> None:
        super().__init__()
        name, _, rest = path.partition(".")
        self.add_module(name, Enclosing(rest, module) if rest else module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls what is inside."""
        (inner,) = self.children()
        return inner(*args, **kwargs)


_calls: WeakKeyDictionary[nn.Module, Call] = WeakKeyDictionary()


def call_of(model: nn.Module) -> Call:
    """What a model that :func:`load_capsule` has built is called with.

    Raises:
        UsageError: it has built none such.
    """
    if model not in _calls:
        raise UsageError("the model is not the module of a capsule", "Use `dtypedoctor replay CAPSULE`.")
    return _calls[model]


def load_capsule(directory: Path, dtype: torch.dtype, device: torch.device, *, allow_code: bool = False) -> nn.Module:
    """The module of the capsule in ``directory``.

    Args:
        directory: the capsule.
        dtype: in which the tensors are that have the most frequent floating dtype in the capsule.
        device: where it is to be.
        allow_code: run the source text that it holds, and make whatever it names.

    Raises:
        UsageError: it cannot be read, or what it names cannot be imported here, or may not be made.
        MemoryError: there is not enough memory for it; RuntimeError where a tensor asked for it.
    """
    capsule = read_capsule(directory)
    script = types.ModuleType("repro")
    path = str(directory / "repro.py")
    model: Any = None
    with contained() as refused:
        if not allow_code:  # before anything is made; of what was read here, whoever may have looked at the file before
            require_known(capsule)
        _require_room(capsule)
        text = capsule_script(capsule, tensors=CAPSULE_TENSORS)
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)
        script.__dict__["__file__"] = path
        exec(compile(text, path, "exec"), script.__dict__)  # noqa: S102  (of literals and calls of what is known, or allowed)
        script.__dict__["DEVICE"] = str(device)
        kept = _converted(script, getattr(torch, capsule.dtype), dtype, device)
        for name in capsule.description["requires_grad"]:
            if name in kept and name.startswith("input."):
                kept[name].requires_grad_()
        module, arguments = script.__dict__["module"](kept), script.__dict__["arguments"](kept)
        if capsule.operator is not None:
            module = _operator(capsule, arguments)
        model = _with_call(module, arguments, script, kept, capsule)
    if (error := refused.error) is not None:
        if isinstance(error, UsageError) or is_out_of_memory(error):
            raise error
        if isinstance(error, CannotBeWrittenError):
            raise UsageError(f"{directory}: the call cannot be rebuilt: {error}", AGAIN)
        words = f"{type(error).__name__}: {error}"
        raise UsageError(f"{directory}: the call cannot be rebuilt here: {words}", "Its libraries must be installed.")
    loaded: nn.Module = model
    return loaded


def _require_room(capsule: Capsule) -> None:
    """Rejects what this machine has no memory for, such as a file of a terabyte that takes no room on a disk.

    Raises:
        UsageError: its tensors are larger than the memory, or the file does not hold what it says.
    """
    capsule.tensors()
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if capsule.memory > room:
        raise UsageError(
            f"{capsule.directory}: its tensors take {capsule.memory >> 20:,} MiB, and this machine has {room >> 20:,}",
            "Replay it on a larger machine.",
        )


def _operator(capsule: Capsule, arguments: Any) -> nn.Module:
    """The operator of a capsule as a module."""
    op = str(capsule.description["call"]["recipe"]["operator"])
    if not (capsule.operator or {}).get("backward"):
        return Operator(op)
    results = list(tensors_of(Operator(op)(*arguments[0], **arguments[1])))
    return Operator(op, (list(results[0].shape), results[0].dtype))


def _converted(
    script: types.ModuleType, main: torch.dtype, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """The tensors on ``device``, those of dtype ``main`` in ``dtype``."""
    random = script.__dict__.get("RANDOM")
    if dtype is not main:
        script.__dict__["CAST"][main] = dtype
    found = {}
    for name, tensor in script.__dict__["kept"]().items():
        changes = tensor.dtype is main and ".packed" not in name and name != random
        found[name] = tensor if name == random else tensor.to(device, dtype if changes else tensor.dtype)
    return found


def _with_call(
    module: nn.Module, arguments: Any, script: types.ModuleType, kept: dict[str, Tensor], capsule: Capsule
) -> nn.Module:
    trained = set(capsule.description["requires_grad"])
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(f"weight.{name}" in trained or isinstance(module, Operator))
    gradients = {index: kept[key] for (_, index), key in script.__dict__.get("GRADIENTS", {}).items()}
    if isinstance(module, Operator) and module.backward is not None:
        gradients = {0: torch.ones_like(module.zero)}
    model = Enclosing(capsule.fqn, module) if capsule.fqn else module
    _calls[model] = Call(
        args=arguments[0],
        kwargs=arguments[1],
        grad=script.__dict__["GRAD"],
        gradients=gradients,
        random=kept.get("random"),
        settings=Settings.now().with_default_dtype(capsule.description["call"].get("default_dtype", "float32")),
    )
    return model


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation on the CPU failed; torch's allocator raises a plain RuntimeError that only names it."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error))


def require_known(capsule: Capsule) -> None:
    """Looks up everything that ``capsule`` names. It imports modules of known libraries, and makes nothing.

    Raises:
        UsageError: it holds code, or something in it is not on a list, or not what the list says that it is.
        ImportError: a library is not installed, or has no such module.
    """
    for why in capsule.code():
        raise UsageError(f"{capsule.directory}: replaying runs code: {why}", ALLOW_CODE)
    for named in capsule.named():
        if why := _why_not(named):
            raise UsageError(f"{capsule.directory}: replaying runs code: {why}", ALLOW_CODE)


def _why_not(named: Named) -> str:
    """Why something that is on a list may not be made all the same; empty where it may."""
    if named.role == "operator":
        return "" if _computes(named.name) else f"the operator {named.shown}, which does more than compute"
    if named.role == "dtype":
        return "" if isinstance(getattr(torch, named.name, None), torch.dtype) else f"{named.shown}, which is no dtype"
    module_name, _, path = named.name.partition(":")
    name, _, member = path.partition(".")
    thing = vars(importlib.import_module(module_name)).get(name)
    if module_name == "torch.nn.functional":
        fits = isinstance(thing, (types.FunctionType, types.BuiltinFunctionType))
        return "" if fits else f"{named.shown}, which is no function"
    own = getattr(thing, "__module__", None), getattr(thing, "__qualname__", None)
    if own != (module_name, name) or not _fits(named.role, thing, member):
        return f"{named.shown}, which is no {_KINDS[named.role]} that {module_name} defines"
    for attribute in filter(partial(_replaces, thing), named.attributes):
        return f"the attribute {attribute} of {named.shown}, which replaces a part of the class"
    return ""


_KINDS = {
    "class": "module class", "forward": "forward of a module", "config": "configuration", "mapping": "output class", "object": "class",
    "function": "function",
}  # fmt: skip


def _fits(role: str, thing: Any, member: str) -> bool:
    """Whether something is of the kind that its role says."""
    if role == "function":
        return _is_function(thing, member)
    if not isinstance(thing, type):
        return False
    is_module = issubclass(thing, nn.Module)
    if role == "class":
        return is_module
    if role == "forward":
        return is_module and isinstance(vars(thing).get("forward"), types.FunctionType)
    if role == "config":
        return not is_module and callable(getattr(thing, "from_dict", None))
    return issubclass(thing, dict) if role == "mapping" else not (is_module or issubclass(thing, BaseException))


def _is_function(thing: Any, member: str) -> bool:
    """Whether it is a function, or what is called in a class: the class would be made by whoever calls it."""
    if not isinstance(thing, type):
        return isinstance(thing, types.FunctionType) and not member
    is_value = issubclass(thing, Enum) and member in thing.__members__
    return is_value or isinstance(vars(thing).get(member), staticmethod)


def _replaces(cls: Any, attribute: str) -> bool:
    """Whether an attribute of an instance takes the place of something that the class calls."""
    if issubclass(cls, nn.Module) and attribute in _MACHINERY:
        return True
    present = inspect.getattr_static(cls, attribute, None)
    return callable(present) or isinstance(present, (staticmethod, classmethod))


def _computes(name: str) -> bool:
    """Whether an operator takes or gives tensors, and no name of a file."""
    _, packet, overload = name.split(".")
    operator = getattr(getattr(torch.ops.aten, packet, None), overload, None)
    if not isinstance(operator, OpOverload):
        return False
    schema = schema_of(operator)
    values = [*schema.arguments, *schema.returns]
    return any("Tensor" in str(value.type) for value in values) and all("file" not in value.name for value in values)


NOT_ALONE = "built again from what a capsule holds, the call does not fail as it did in the program"
LONGEST = 3.0
"""Seconds of processor time after which no other fix is tried."""
FIXED, NOT_FIXED, NOT_TRIED = "fixed", "not-fixed", "not-tried"
KEEP_FLOAT32 = "keep-float32"


def tried_fixes(call: LiveCall, kind: Kind, fixes: Sequence[str], error: str = "") -> list[dict[str, str]]:
    """What each fix that works on a call does to ``call``, as :class:`dtypedoctor.replay.capsule.CallFix` has it.

    Nothing where the call does not show its failure.

    Args:
        call: fails, and may be made as often as it takes.
        kind: how it fails.
        fixes: ids; those that change more than a call are left out.
        error: signature of what it raises; empty for whatever that is.
    """
    found: list[dict[str, str]] = []
    if kind is Kind.SILENT or not _fails_as(call, kind, error):
        return found
    until = process_time() + LONGEST
    for fix in fixes:
        change = _change(fix)
        if change is None:
            continue
        if process_time() > until:
            found.append(_row(fix, NOT_TRIED, f"the fixes before it took {LONGEST:.0f} s"))
            continue
        rows = list(_tried(fix, change, call))
        if not _fails_as(call, kind, error):  # it is still in place, or the call fails now and then
            return [*found, *(row if row["outcome"] != FIXED else _row(fix, NOT_TRIED, _PASSES_TOO) for row in rows)]
        found += rows
    return found


_PASSES_TOO = "after it the call passes without it too, so that what made the difference is not known"


def _tried(fix: str, change: "Change", call: LiveCall) -> Iterator[dict[str, str]]:
    """What came of one fix; nothing where there is nothing in the call that it would change."""
    reason = note = ""
    with contained() as trouble, change(call) as (changed, done):
        reason = _objection(changed)
        note = done()
    if isinstance(trouble.error, TargetMismatchError):
        return
    if trouble.error is not None:
        yield _row(fix, NOT_TRIED, f"it could not be put in place: {_named(trouble.error)}")
    else:
        yield _row(fix, NOT_FIXED if reason else FIXED, reason or note)


def _row(fix: str, outcome: str, reason: str) -> dict[str, str]:
    return {"fix": fix, "outcome": outcome, "reason": reason}


def try_on_capsules(directory: Path) -> None:
    """Tries every fix that may fit on the calls that this process has left as capsules beside its trace, and adds to each what came of it.

    Which of the fixes matter is known only with the finding. What a call prints is swallowed, and what it would change outside of the process rejected.
    A capsule of which the call, built from its files alone, does not fail as it did in the program is given up: it depends on more than they hold.

    Args:
        directory: of the trace.
    """
    for path in sorted(directory.glob("capsule-*-*.json")):
        with contained():  # without this the capsule says nothing of fixes
            description = parse_json(path.read_bytes())
            if "why" in description:
                continue
            device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
            with _as_capsule(path) as capsule:
                call = _built(capsule, device)
            kind, error = Kind(description["kind"]), description["error"]
            with as_before((), get_ident(), lambda: False):
                if kind is Kind.SILENT or _fails_as(call, kind, error):
                    description["fixes"] = tried_fixes(call, kind, _that_may_fit(call.module), error)
                else:
                    description["why"] = NOT_ALONE
            path.write_text(to_json(description), encoding="utf-8")


@contextmanager
def _as_capsule(path: Path) -> Iterator[Path]:
    """A directory that holds the files of the capsule under the names that they have when it is read."""
    with TemporaryDirectory(dir=path.parent) as name:
        os.link(path, f"{name}/{CAPSULE}")
        os.link(path.with_suffix(".safetensors"), f"{name}/{CAPSULE_TENSORS}")
        yield Path(name)


def _built(directory: Path, device: torch.device) -> LiveCall:
    """The call of a capsule, in its own dtype."""
    capsule = read_capsule(directory)
    # The source text is that of the program, which has just run it.
    model = load_capsule(directory, getattr(torch, capsule.dtype), device, allow_code=True)
    call, described = call_of(model), capsule.description["call"]
    return LiveCall(
        called=model.get_submodule(capsule.fqn).train(described["training"]),
        fqn=capsule.fqn,
        args=call.args,
        kwargs=call.kwargs,
        grad=call.grad,
        inference=False,
        autocast=tuple(
            AutocastState(device=name, dtype=getattr(torch, dtype)) for name, dtype in described["autocast"]
        ),
        known_settings=call.settings,
        training=described["training"],
        random=RandomState(cpu=call.random) if call.random is not None else None,
        gradients=call.gradients,
    )


def _that_may_fit(module: nn.Module) -> list[str]:
    """Ids of the fixes of a call that are made for any class, or for one that is in ``module``."""
    classes = {"", *(type(part).__name__ for part in module.modules())}
    corrections = registered(Correction).values()
    fitting = [one.id for one in corrections if one.in_scripts and classes & {name for _, name in one.fixes}]
    return [KEEP_FLOAT32, *_CHANGES, *(name for name in fitting if name != KEEP_FLOAT32)]


def _failure(call: LiveCall) -> tuple[Kind, BaseException | None] | None:
    """How ``call`` fails when it is made, and what it raises; None where it returns, and passes back, finite values."""
    repeat = on_copies(call)
    if repeat.error is not None:
        return Kind.RAISED, repeat.error
    if not all(map(is_finite, tensors_of(repeat.output))):
        return Kind.NONFINITE, None
    return None if all(map(is_finite, repeat.gradients.values())) else (Kind.BACKWARD, None)


def _fails_as(call: LiveCall, kind: Kind, error: str) -> bool:
    """Whether ``call`` fails in this way, and with an exception of this signature where one is given."""
    failure = _failure(call)
    return failure is not None and failure[0] is kind and error in ("", signature(failure[1]))


_WORDS = {Kind.NONFINITE: "the output is not finite", Kind.BACKWARD: "the gradients are not finite"}


def _objection(call: LiveCall) -> str:
    """How ``call`` fails, as a clause; empty where it does not."""
    failure = _failure(call)
    if failure is None:
        return ""
    kind, error = failure
    return f"raises {_named(error)}" if error is not None else _WORDS[kind]


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {message_of(error)}".split("\n")[0][:300]


Done = Callable[[], str]
"""What a fix has done beside making the call pass, as a clause; empty for nothing."""
Change = Callable[[LiveCall], AbstractContextManager[tuple[LiveCall, Done]]]
"""Inside, the call that it gives has the fix; afterwards the module is as it was."""


def _nothing() -> str:
    return ""


def _change(fix: str) -> Change | None:
    """How a fix changes a call; None for one that changes a whole run."""
    if fix in _CHANGES:
        return _CHANGES[fix]
    correction = registered(Correction).get(fix)
    if correction is None or not correction.in_scripts or correction.edits:
        return None
    return lambda call: _corrected(call, fix, [""] if correction.needs_modules else [])


@contextmanager
def _corrected(call: LiveCall, correction: str, modules: Sequence[str]) -> Iterator[tuple[LiveCall, Done]]:
    installed = put_in(correction, call.module, modules)

    def done() -> str:
        clamped = installed.counters.elements("clamped")
        if clamped == 1:
            return "1 element beyond the range of its dtype is clamped to its max"
        return f"{clamped:,} elements beyond the range of their dtype are clamped to its max" if clamped else ""

    try:
        yield call, done
    finally:
        installed.undo()


@contextmanager
def _in_bfloat16(call: LiveCall) -> Iterator[tuple[LiveCall, Done]]:
    """Weights, buffers and inputs that are float16 are bfloat16."""
    if all(tensor.dtype is not torch.float16 for _, tensor in (*call.parameters(), *call.buffers(), *call.inputs())):
        raise TargetMismatchError("nothing in the call is float16")
    with in_dtype(call, torch.bfloat16, (torch.float16,)) as changed:
        yield changed, _nothing


@contextmanager
def _without_autocast(call: LiveCall) -> Iterator[tuple[LiveCall, Done]]:
    if not call.autocast:
        raise TargetMismatchError("the call is in no autocast region")
    yield replace(call, autocast=()), _nothing


@contextmanager
def _autocast_of_weights(call: LiveCall) -> Iterator[tuple[LiveCall, Done]]:
    """The regions have the dtype of the module's own weights, where that is a 16-bit one."""
    dtypes = [tensor.dtype for _, tensor in call.parameters() if tensor.dtype in (torch.float16, torch.bfloat16)]
    if not call.autocast or not dtypes:
        raise TargetMismatchError("the call is in no autocast region, or has no 16-bit weights")
    dtype = max(set(dtypes), key=dtypes.count)
    regions = tuple(AutocastState(device=state.device, dtype=dtype) for state in call.autocast)
    yield replace(call, autocast=regions), _nothing


_CHANGES: dict[str, Change] = {
    "bfloat16": _in_bfloat16,
    "autocast-off": _without_autocast,
    "autocast-dtype-of-model": _autocast_of_weights,
}
