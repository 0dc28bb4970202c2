"""Tries fixes on the failing call of a replay, in the process that has just kept it as a capsule: what works is *fixed on this call*.

One call is made for each fix, with the fix in place, and one without it after that, which must fail as before: so nothing but the fix has made the
difference. The call is built from the files of the capsule once the program is over (:func:`try_on_capsules`), and shares nothing with it.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import get_ident

import torch
from torch import Tensor, nn

from dtypedoctor.corrections.contract import TargetMismatchError, put_in
from dtypedoctor.foreign_files import parse_json
from dtypedoctor.instrument.capsule import Kind, signature
from dtypedoctor.instrument.live_call import AutocastState, LiveCall, Repeat, copied, mapped, tensors_of
from dtypedoctor.instrument.settings import RandomState
from dtypedoctor.instrument.untouched import as_before
from dtypedoctor.interruptions import contained
from dtypedoctor.plugins import Correction, registered
from dtypedoctor.redaction.messages import message_of
from dtypedoctor.replay.capsule import CAPSULE, CAPSULE_TENSORS, read_capsule
from dtypedoctor.unpatched import process_time, to_json
from dtypedoctor.worker.capsule_call import call_of, load_capsule

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
        module=model.get_submodule(capsule.fqn).train(described["training"]),
        fqn=capsule.fqn,
        args=call.args,
        kwargs=call.kwargs,
        grad=call.grad,
        inference=False,
        autocast=tuple(
            AutocastState(device=name, dtype=getattr(torch, dtype)) for name, dtype in described["autocast"]
        ),
        settings=call.settings,
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
    memo: dict[int, object] = {}
    repeat = Repeat()
    with contained() as ours:
        repeat = call.again(args=copied(call.args, memo), kwargs=copied(call.kwargs, memo))
    error = ours.error or repeat.error
    if error is not None:
        return Kind.RAISED, error
    if not all(map(_is_finite, tensors_of(repeat.output))):
        return Kind.NONFINITE, None
    return None if all(map(_is_finite, repeat.gradients.values())) else (Kind.BACKWARD, None)


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


def _is_finite(tensor: Tensor) -> bool:
    numbers = tensor.is_floating_point() or tensor.is_complex()
    return not numbers or bool(tensor.detach().isfinite().all())


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
    held = {id(tensor): tensor for _, tensor in (*call.parameters(), *call.buffers()) if tensor.dtype is torch.float16}
    before = [(tensor, tensor.data) for tensor in held.values()]
    memo: dict[int, object] = {}
    args, kwargs = mapped(call.args, _bfloat16, memo), mapped(call.kwargs, _bfloat16, memo)
    if not before and all(tensor.dtype is not torch.float16 for _, tensor in call.inputs()):
        raise TargetMismatchError("nothing in the call is float16")
    try:
        for tensor, data in before:
            tensor.data = data.to(torch.bfloat16)
        yield replace(call, args=args, kwargs=kwargs), _nothing
    finally:
        for tensor, data in before:
            tensor.data = data


def _bfloat16(tensor: Tensor) -> Tensor:
    return (
        tensor.detach().to(torch.bfloat16).requires_grad_(tensor.requires_grad)
        if tensor.dtype is torch.float16
        else tensor
    )


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
