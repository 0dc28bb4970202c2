"""Makes a module call again inside of the running program, under the op trace, at the moment at which it has failed.

For programs of which no fork can go on: those that use CUDA, above all. Each outermost call is kept by reference
(:class:`~dtypedoctor.instrument.live_call.LiveCall`) until the optimizer has stepped. A call is replayed when it has raised, or when something
that it made is known not to be finite; on CUDA that is what has arrived at the end of a later call, after a backward pass or before an optimizer
step. Nobody waits for the device until then.

The operators of a replay are recorded in the trace of the run itself, with numbers that were reserved when the call, or the backward pass, began:
so they stand where they would stand if the op trace had been on.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dtypedoctor._torch_private import (
    DisableTorchFunction,
    at_end_of_backward,
    hook_gradient,
    is_capturing,
    is_refusal_of_compiler,
    parameters_of,
    transformation,
)
from dtypedoctor.instrument.float32_program import Originals
from dtypedoctor.instrument.frames import line_of, source_of
from dtypedoctor.instrument.live_call import GradientHook, LiveCall, as_leaf, inputs_in, tensors_of
from dtypedoctor.instrument.module_tree import (
    ByModule,
    calls_alone,
    is_of_several,
    is_sharded,
    mapped,
    modules_in,
    named_tensors,
    owner_of,
    parameter_not_here,
    parameters_in,
)
from dtypedoctor.instrument.operators import bytes_of, why_opaque
from dtypedoctor.instrument.optimizer_replay import OptimizerReplays, show_operands
from dtypedoctor.instrument.optrace import OpTrace
from dtypedoctor.instrument.packed_weights import packed_dtypes
from dtypedoctor.instrument.phases import Phases, ScalerStep
from dtypedoctor.instrument.recorders import Nonfinite
from dtypedoctor.instrument.repeated_call import (
    MAX_HELD,
    CopiesOfParameters,
    InnerCalls,
    KeptCall,
    Made,
    RepeatedCall,
    Versions,
    is_same,
    share_of_device,
    type_and_message,
)
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.statistics import is_finite, out_of_their_sight
from dtypedoctor.instrument.untouched import CannotReplayError, at_moment
from dtypedoctor.instrument.whereabouts import call_arguments
from dtypedoctor.trace.events import REPLAY_OF_FAILURES
from dtypedoctor.trace.records.execution import EAGER, ReplayedCall
from dtypedoctor.trace.records.silent import (
    Absorbed,
    FloatToInt,
    RoundedAngles,
    RouterChoice,
    ScaledBackward,
)
from dtypedoctor.unpatched import perf_counter, to_json

if TYPE_CHECKING:
    from dtypedoctor.instrument.watch import ModuleWatch

__all__ = ["InPlaceReplays"]

RESERVED = 1 << 20
"""Numbers of the trace that are kept free before each outermost call and backward pass, for the operators of a replay."""
MAX_KEPT = 8
"""Outermost calls that are kept at a time."""
CAPSULE_LIMIT = 64 << 20
"""Bytes that a capsule may take if nobody says otherwise."""
OF_ALL_CAPSULES = 4
"""How many times as much all capsules may take that wait beside the trace until it is known which of them is kept."""
IN_PLACE = "capsule-{call}-{kind}"
"""Name of the files of a capsule, beside the trace, until it is known whether it is of what is found."""
SILENT = "silent"
_KINDS = {
    "raised": "raised",
    "value": "nonfinite",
    "gradient": "backward",
    "backward raised": "backward",
    SILENT: "silent",
}
"""How the call fails, by why it is replayed."""
_OF_ONE_CALL = (Absorbed, FloatToInt, RouterChoice, RoundedAngles)
"""What a look sees of which everything that the call returns may be finite."""
MAX_REPLAYS = 12
MAX_SECONDS = 60.0
"""Replays in one process, and the time after which no further one begins."""
GRADIENTS = frozenset({"grad_output", "grad", "accumulated"})
"""Kinds of sites that a backward pass makes."""
RESULTS = frozenset({"output", "input"})
"""Kinds of sites that a module call makes."""

USUAL = frozenset({"float16", "bfloat16"})
"""Dtypes of quantization states that every dequantizer has a kernel for."""

ZEROS = "zeros"
"""Why a call is replayed whose gradients are zero for the most part."""
UPSTREAM = "the gradient of what the model returns"

VERSIONS = 4
"""Parameters of a module whose versions are compared."""
MAX_WAITING = 4
"""Failed calls that wait until their parameters are unsharded again."""
NOT_HERE = "{} was resharded before it was known that the call had failed, and was not gathered again; --rerun runs all ranks again"
SPOILT = "that a call of {} had failed was known only when its inputs or parameters were not finite any more; --rerun runs the script again"
NONE_ALONE = (
    "FullyShardedDataParallel (FSDP1) and DeepSpeed's ZeRO-3 gather parameters in ways that one rank cannot repeat; "
    "with fully_shard (FSDP2), or --rerun, the call can be replayed"
)
_DEAD = ("CUDA error", "device-side assert")
"""What an exception says after which the device answers no more."""
_NOT_FAILURES = (torch.OutOfMemoryError, StopIteration, StopAsyncIteration, MemoryError, RecursionError)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """A failed call whose parameters are sharded: the call, why and how it is to be replayed, and a parameter that is not there."""

    kept: KeptCall
    why: str
    backward: bool
    gone: str


class InPlaceReplays:
    """Keeps outermost calls, and replays those that fail; in a job of several ranks those calls that a rank can make alone.

    Under FSDP2 a call is replayed while its parameters are unsharded: at its end, in the backward pass when its gradients are computed, and
    before the first unit gives its own away. What becomes known later, as everything on CUDA, is replayed with copies of them, as far as these are
    still there, or waits until they are unsharded again.

    Args:
        session: of the process.
        modules: says when outermost modules are called.
        phases: says when backward passes and optimizer steps begin and end.
        originals: values that casts have rounded away; see :class:`OpTrace`.
        aside: called for a context in which the instruments that watch operators stand aside.
        measure: has all parameters measured that were not since the last optimizer step.
        shown: gives a context in which the checks for silent failures see a call that is made again.

    Attributes:
        begun: whether calls are kept.
        count: replays so far.
        written: names of the capsules that were left beside the trace, and whether they hold a call.
    """

    def __init__(self, session: Session, modules: "ModuleWatch", phases: Phases, originals: Originals,
                 aside: Callable[[], Any], measure: Callable[[], None],
                 shown: Callable[[], AbstractContextManager[Any]]) -> None:  # fmt: skip
        self._session, self._modules, self._phases = session, modules, phases
        self._originals = originals
        self._aside, self._shown = aside, shown
        self._calls: list[KeptCall] = []
        self._current: KeptCall | None = None
        self._waiting: list[_Waiting] = []
        self._copies = CopiesOfParameters(session)
        self._steps = OptimizerReplays(session, self._new_trace, measure)
        self._late = False
        self._some: ByModule[tuple[tuple[ref[nn.Module], str], ...]] = ByModule()
        self._alone: ByModule[tuple[type, frozenset[int], bool]] = ByModule()
        self._draws_on_host: ByModule[bool] = ByModule()
        """Whether a call of the module has drawn from Python's generator or NumPy's while it was looked at."""
        self._sharded = False
        self._asked = False
        self._failed: tuple[str, str] | None = None
        self._places: set[tuple[object, ...]] = set()
        self._spent = 0.0
        self._trace: OpTrace | None = None
        self._packed: dict[int, set[str]] = {}
        self.written: dict[str, bool] = {}
        self.count = 0
        self.begun = False
        self._silent: list[str] = []
        self._leaf: Tensor | None = None
        self._recomputed: KeptCall | None = None
        self._explained = 0
        """The last step in which a recomputed call was made again that was not finite: its gradients are not either."""
        self._zeros = False
        self._scales = False
        self._every = 0
        self._capsule_limit: int | None = CAPSULE_LIMIT
        self._capsule_room = 0

    def _is_forced(self, kept: KeptCall) -> bool:
        return bool(self._every) and kept.call % self._every == 0 and not kept.old

    def begin(self, *, force: int = 0, late: bool = False, capsule_limit: int | None = CAPSULE_LIMIT) -> None:
        """Begins to keep calls. Listens after the instruments, which have then seen what happened.

        Args:
            force: each so-manieth call is replayed, forward and backward, although nothing is wrong; for tests, and without a bound.
            late: what a CPU computes is looked at when the next outermost call begins, as if it had come from a device; for tests.
            capsule_limit: bytes that the capsule of a failing call may take; None keeps none.
        """
        self.begun, self._every, self._late = True, force, late
        self._capsule_limit, self._capsule_room = capsule_limit, OF_ALL_CAPSULES * (capsule_limit or 0)
        modules, phases = self._modules, self._phases
        self._session.seen_once = self._seen_silent
        modules.before_root.append(self._enter_root)
        modules.on_error.append(self._raised)
        modules.on_return.append(self._root_returned)
        modules.when_left.append(self._left)
        modules.before_alone.append(self._enter)
        modules.alone_returned.append(self._returned)
        modules.alone_left.append(self._left)
        phases.before_backward.append(self._before_backward)
        phases.on_failure.append(self._backward_raised)
        phases.after_backward.append(self._after_backward)
        phases.before_unscale.append(self._before_unscale)
        phases.before_step.append(self._before_step)
        phases.after_scaler.append(self._after_scaler)
        phases.after_step.append(self._after_step)

    def finish(self) -> None:
        """The program is over: replays what was not known before, and says which calls wait for parameters that did not come back."""
        if self.begun:
            self._modules.recorders.finish()
            self._session.guard.shield(self._look_now, REPLAY_OF_FAILURES)()
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            self._session.guard.tell(REPLAY_OF_FAILURES, NOT_HERE.format(one.gone))
        self._calls, self._current = (
            [],
            None,
        )  # their tensors have hooks that hold this: no collector of Python's finds such a circle
        self._copies.forget()

    def zeros_seen(self) -> None:
        """The gradients with which an optimizer is about to step are zero for the most part, where float16 is at work."""
        self._zeros = self.begun

    # What happens in the program ---------------------------------------------------------------------------------------------------------

    def _enter_root(self, module: nn.Module) -> None:
        """An outermost call begins."""
        self._current = None
        if self._session.position.backward_depth:
            if self._is_known_at_once(module):
                self._recomputed = self._entered(module)
            return
        self._look_now()
        if is_of_several():
            # Modules that a rank can call alone, and whether they are units of FSDP2 or between such.
            kind, alone, self._sharded = self._alone.get(module) or (None, frozenset[int](), False)
            if kind is not type(module):  # fully_shard changes it
                alone = frozenset(map(id, calls_alone(module)))
                self._sharded = any(map(is_sharded, modules_in(module)))
                self._alone[module] = (type(module), alone, self._sharded)
            if not alone:
                self._session.guard.tell(REPLAY_OF_FAILURES, NONE_ALONE)
            self._modules.alone = alone - {id(module)}
            if id(module) not in alone:
                return
        elif self._sharded or self._modules.alone:  # the job is over
            self._modules.alone, self._sharded = frozenset(), False
        self._enter(module)

    def _enter(self, module: nn.Module) -> None:
        """A call begins that may be replayed."""
        self._current = None
        if not self._session.position.backward_depth and (kept := self._entered(module)) is not None:
            self._current = kept
            self._keep(kept)

    def _entered(self, module: nn.Module) -> KeptCall | None:
        """A call that begins, by reference; None where it cannot be made again, or holds too much."""
        position = self._session.position
        here = position.of.here or position.last
        if (torch.cuda.is_initialized() and is_capturing()) or transformation() is not None:
            return None
        args, kwargs, size = _by_reference(*call_arguments(module))
        if size > MAX_HELD:
            return None
        found, looks = self._session.names.find(module), self._session.position.looks
        return KeptCall(
            live=LiveCall.entered(
                module,
                found[1] if found is not None else "",
                args,
                kwargs,
                settings=looks,
                host=looks or self._draws_on_host.get(module) is not False,
            ),
            size=size,
            number=self._session.writer.next_n(RESERVED),
            step=position.step,
            call=here.call,
            overrides=tuple(here.overrides),
            regions=tuple(self._session.autocast.of.regions),
            line=line_of(sys._getframe()),
            versions=Versions(self._some_parameters(module)),
            depth=here.backward_depth,
        )

    def _let_go(self, kept: KeptCall) -> None:
        """Nothing comes back through a call: a model that the program has no use for any more is not to take up memory. A loss without parameters
        takes none, and lives for one call only."""
        if self._some_parameters(kept.live.module):
            kept.live.let_go(self._a_module_is_gone)

    def _a_graph_is_gone(self, call: "ref[KeptCall]", _: "ref[GradientHook]") -> None:
        kept = call()
        if kept is not None and not any(hook() for hook in kept.hooks):
            kept.hooks.clear()
            self._let_go(kept)

    def _a_module_is_gone(self, _: "ref[nn.Module]") -> None:
        """The program has let go of a module: its calls cannot be made again, and hold their inputs no longer."""
        self._calls = [kept for kept in self._calls if kept.live.is_there]

    def _some_parameters(self, module: nn.Module) -> "tuple[tuple[ref[nn.Module], str], ...]":
        """A few of the parameters of an outermost module, far apart, by owner and name: who updates some updates others too."""
        some = self._some.get(module)
        if some is None:
            names = [name for name, _ in named_tensors(module, buffers=False)]
            owners = (owner_of(module, name) for name in names[:: -(-len(names) // VERSIONS) or 1])
            some = self._some[module] = tuple((ref(owner), name) for owner, name in owners)
        return some

    def _keep(self, entered: KeptCall) -> None:
        """Keeps a call, and lets go of those before it as far as they are too old or too large."""
        calls = [kept for kept in self._calls if kept.call > entered.call - MAX_KEPT]
        if not torch.is_grad_enabled():  # nothing comes back later: what arrives is of the last calls
            calls = calls[-2:]
        left = share_of_device() - entered.size
        kept_calls = [entered]
        for kept in reversed(calls):
            left -= kept.size
            if left < 0:
                break
            kept_calls.append(kept)
        self._calls = kept_calls[::-1]

    def _raised(self, module: nn.Module, args: Any, error: BaseException) -> None:
        """The innermost module call has raised, and the exception is on its way out."""
        if self._current is not None:
            self._current.error = type_and_message(error) if _is_failure(error) else None

    def _root_returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """The outermost call has returned."""
        if self._recomputed is not None and self._recomputed.live.module is module:
            with out_of_their_sight():
                self._recomputed.made = list(map(Made, tensors_of(output)))
        self._returned(module, args, kwargs, output)
        if self._sharded:
            for tensor in filter(_comes_back, tensors_of(output)):
                hook_gradient(tensor, GradientHook(self._ask_for_end))

    def _returned(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """A call that may be replayed has returned."""
        kept = self._current
        if kept is None or kept.live.module is not module or kept.call != self._session.position.call:
            return
        kept.error = None  # the program has caught what was raised inside
        if self._session.position.looks and kept.live.random is not None:
            drew_before = bool(self._draws_on_host.get(kept.live.module))
            self._draws_on_host[kept.live.module] = drew_before or kept.live.random.host_has_moved()
        tensors = tensors_of(output)
        with out_of_their_sight():
            kept.made = list(map(Made, tensors))
        is_last = True
        for index, tensor in enumerate(tensors):
            if _comes_back(tensor):
                is_last = False
                if tensor.nbytes <= MAX_HELD:  # what comes back is kept by reference
                    hook = GradientHook(partial(kept.live.gradients.setdefault, index))
                    hook_gradient(tensor, hook)
                    kept.hooks.append(ref(hook, partial(self._a_graph_is_gone, ref(kept))))
        if is_last:  # nothing can come back, and its module may die
            self._let_go(kept)
        for tensor in filter(_comes_back, tensors_of((args, kwargs)) if self._sharded else ()):
            # a tensor that holds what holds it would stay until Python's collector comes
            hook_gradient(tensor, GradientHook(partial(self._went_back, ref(kept))))

    def _left(self, module: nn.Module) -> None:
        """A call that may be replayed is over, and its module's name is off the stack; the parameters of a unit are there."""
        kept, self._current = self._current, None
        if kept is not None and kept.live.module is module:
            if reason := self._reason_to_replay(kept):
                self._replay(kept, reason)
            if self._sharded and kept.error is None and self._is_known_later(module):
                self._copies.keep(kept, self._calls)
        self._look()
        if kept is not None and kept.live.module is module and self._silent:
            self._replay(kept, SILENT)
        self._silent.clear()
        self._recomputed = None

    def _reason_to_replay(self, kept: KeptCall) -> str:
        """Why a call that is over is replayed at once; empty where it is not."""
        if kept.error is not None and self._is_new("raised", kept.live.fqn, *kept.error):
            return "raised"
        if self._is_forced(kept):
            return "forced"
        return "packed" if self._is_doubtful(kept.live.module) else ""

    def _seen_silent(self, record: Any, fqn: str | None) -> None:
        """A look has seen something in the module ``fqn`` that no result shows: the call of the first is kept as a capsule."""
        is_wanted = self._capsule_limit is not None and isinstance(record, _OF_ONE_CALL)
        if is_wanted and fqn is not None and self._current is not None:
            # What a router chooses is used in the module around it.
            self._silent.append(fqn.rpartition(".")[0] if isinstance(record, RouterChoice) else fqn)

    def ends(self, error: BaseException, *, outside: bool) -> None:
        """The program ends with ``error``; ``outside``: it was raised outside of all modules and of backward passes."""
        if self.begun and outside and _is_failure(error):
            with self._aside(), self._phases.standing_aside():
                show_operands(error, self._session, self._new_trace())

    def _before_backward(self, tensors: object) -> None:
        self._asked = False
        part = RESERVED // MAX_KEPT
        first = self._session.writer.next_n(part * max(MAX_KEPT, len(self._calls)))
        for number, kept in enumerate(self._calls):
            if not kept.old:
                kept.backward = first + number * part

    def _ask_for_end(self, _: Tensor | None) -> None:
        """A backward pass comes to what an outermost call has returned, before FSDP2 hears of it, and so does its end."""
        if not self._asked:
            self._asked = True
            at_end_of_backward(self._session.guard.shield(self._before_reduction, REPLAY_OF_FAILURES))

    def _went_back(self, call: "ref[KeptCall]", gradient: Tensor | None) -> None:
        """The backward pass through a call is over, and the parameters of its unit are still there; the call may have been let go of."""
        kept = call()
        if kept is None or gradient is None or self._session.position.muted or self._modules.is_replaying:
            return
        if self._is_forced(kept):
            self._through([kept], "forced", None)
        elif self._is_known_later(kept.live.module):
            self._copies.keep(kept, self._calls)
        elif not gradient.is_cuda and (not is_finite(gradient) or _has_bad_gradient(kept)):
            self._fails_backward(kept)
        self._look()

    def _before_reduction(self) -> None:
        """A backward pass has computed all gradients, and the units that nothing else has told of have their parameters."""
        for kept in reversed(self._calls):
            is_copied = kept.copies is not None and not self._every
            if not (kept.old or is_copied) and kept.live.gradients and not parameter_not_here(kept.live.module):
                if self._is_forced(kept):
                    self._through([kept], "forced", None)
                elif self._is_known_later(kept.live.module):
                    self._copies.keep(kept, self._calls)
                elif _has_bad_gradient(kept):
                    self._fails_backward(kept)
        self._look()

    def _fails_backward(self, kept: KeptCall) -> None:
        """A gradient that leaves a call is not finite, on a CPU; the one that made it is replayed."""
        if kept.gets_finite_gradients() and self._is_new("gradient", kept.step):
            self._through([kept], "gradient", None)

    def _backward_raised(self, error: BaseException) -> None:
        if self._session.position.backward_depth and _is_failure(error):
            self._failed = type_and_message(error)

    def _after_backward(self) -> None:
        failed, self._failed = self._failed, None
        if failed is not None and self._is_new("backward", *failed):
            self._through([kept for kept in reversed(self._calls) if not kept.old], "backward raised", failed)
        elif self._every:
            self._through(list(filter(self._is_forced, self._calls)), "forced", None)
        self._look()

    def _before_step(self, optimizer: Optimizer) -> None:
        self._look()
        if self._zeros:
            self._zeros = False
            self._scale_gradients()
        self._steps.before_step(optimizer)

    def _before_unscale(self, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
        self._scales = self._scales or scaler.is_enabled()

    def _after_scaler(self, ended: ScalerStep) -> None:
        if not ended.called:
            self._modules.recorders.flush()
            self._look()
            self._step_is_over()

    def _after_step(self, optimizer: Optimizer) -> None:
        self._steps.after_step(optimizer)
        self._step_is_over()
        for kept in (*self._calls, *[one.kept for one in self._waiting]):
            kept.moved = True

    def _step_is_over(self) -> None:
        """What a device computes may become known in the next step; the inputs of a call whose results are known are the program's own again."""
        self._calls = [kept for kept in self._calls if not kept.old and not self._is_known_at_once(kept.live.module)]
        for kept in self._calls:
            kept.old = True

    # What is replayed --------------------------------------------------------------------------------------------------------------------

    def _is_new(self, *place: object) -> bool:
        new = place not in self._places
        self._places.add(place)
        return new

    def _is_doubtful(self, module: nn.Module) -> bool:
        """Whether this was the first call of a model whose packed weights may be dequantized wrongly: its quantization states say something
        else than those of a model before it, or no 16-bit dtype."""
        found = self._session.names.find(module)
        if found is None or found[0] in self._packed:
            return False
        before = set().union(*self._packed.values())
        dtypes = self._packed[found[0]] = packed_dtypes(self._session.names, found[0])
        return bool(dtypes - USUAL) or bool(before and not dtypes <= before)

    def _is_known_later(self, module: nn.Module) -> bool:
        """Whether what ``module`` computes is known only when its parameters may have been resharded."""
        return self._late or any(parameter.is_cuda for parameter in parameters_in(module))

    def _is_known_at_once(self, module: nn.Module) -> bool:
        """Whether what ``module`` computes is measured when it returns, and can be made again by this process alone.

        One known parameter tells: this is asked after each step, and the program may have its own ``parameters``.
        """
        if self._late or is_of_several():
            return False
        some = self._some_parameters(module)
        owner, name = (some[0][0](), some[0][1]) if some else (None, "")
        parameter = parameters_of(owner).get(name) if owner is not None else None
        return parameter is None or not parameter.is_cuda

    def _look(self) -> None:
        """Replays the calls of what has become known by now not to be finite."""
        if not self._late:
            self._look_now()

    def _look_now(self) -> None:
        """Replays the calls of what is known not to be finite: the first result of a module, and the first gradient."""
        if self._modules.recorders.news.found or self._waiting:  # seldom
            self._replay_news()

    def _replay_news(self) -> None:
        news = sorted(self._modules.recorders.news.take())
        if news and self._follows_from_step():
            return
        # A loss that no module has returned may have got something that a module has made and kept.
        for found in [one for one in news if one.kind in RESULTS or one.kind == "loss"][:1]:
            self._replay_forward(found)
        for found in [one for one in news if one.kind in GRADIENTS][:1]:
            self._replay_backward(found)
        self._replay_waiting()

    def _replay_backward(self, found: Nonfinite) -> None:
        """Replays the backward pass through the calls behind a gradient that is not finite; under FSDP2 once a step."""
        if found.step == self._explained or (self._sharded and not self._is_new("gradient", found.step)):
            return
        calls = self._calls_behind(found)
        leaf = self._leaf = self._parameter(calls, found.fqn) if found.kind == "accumulated" else None
        if not self._through(calls, "gradient", None) and leaf is not None:
            self._add_up(leaf, found.step)
        self._leaf = None

    def _parameter(self, calls: list[KeptCall], fqn: str) -> Tensor | None:
        """The parameter of that dotted name."""
        known = self._session.names.parameters()
        held = (parameter for kept in calls[:1] for _, parameter in kept.live.parameters())
        return next((one for one in held if known.get(id(one), (0, ""))[1] == fqn), None)

    def _add_up(self, leaf: Tensor, step: int) -> None:
        """Every backward pass has made a finite gradient of a parameter: adds them up under the op trace, as autograd has."""
        calls = [kept for kept in self._calls if kept.step == step and kept.part is not None]
        parts = [kept.part for kept in calls if kept.part is not None]
        if len(parts) < 2 or leaf.grad is None:
            return
        kept, session, ops = calls[-1], self._session, self._new_trace()
        number = kept.backward + RESERVED // MAX_KEPT // 2  # behind those of its replay
        moment = at_moment(session, number, step=step, call=kept.call, overrides=kept.overrides, depth=1)
        with self._aside(), moment, torch.no_grad():
            ops.open()
            total = parts[0].clone()
            for part in parts[1:]:
                total.add_(part)
            ops.close()
            if not is_same(total, leaf.grad):  # there were others, or the program has changed it
                session.writer.forget_held()

    def _follows_from_step(self) -> bool:
        """Whether an optimizer step has made a parameter inf or NaN; the step is made again, and what follows from it is not."""
        if not self._steps.has_explained:
            with self._aside(), self._phases.standing_aside():
                self._steps.explain()
        return self._steps.has_explained

    def _new_trace(self) -> OpTrace:
        first = self._trace.next_id if self._trace is not None else 1
        self._trace = OpTrace(self._session, self._originals, first_id=first)
        return self._trace

    def _replay_forward(self, found: Nonfinite) -> None:
        """Replays the call that holds a result that is not finite; of a job of several ranks not where it got such values itself."""
        recomputed = self._recomputed  # with weights that the program may have changed since its call
        if recomputed is not None and recomputed.is_spoilt():
            recomputed = None  # what it was saved for has got that before
        calls = self._calls if recomputed is None else [recomputed]
        holding = [kept for kept in calls if kept.holds(found.call, found.fqn)]
        if found.kind == "loss":  # between looks what calls return is not measured
            holding = [kept for kept in calls if kept.step == found.step and kept.has_bad_results()][:1] or holding
        for kept in holding:
            kept.bad |= {found.fqn} if found.kind in RESULTS else set()
            if not (self._modules.alone and kept.is_spoilt()) and not self._is_spoilt_since(kept):
                replayed = self._replay_or_wait(kept, "value")
                if recomputed is not None and replayed:
                    self._explained = kept.step

    def _is_spoilt_since(self, kept: KeptCall) -> bool:
        """Whether parameters have been updated since a call, and are not finite now: says so."""
        spoilt = kept.has_moved and kept.copies is None and kept.has_bad_parameters()
        if spoilt:
            self._session.guard.tell(REPLAY_OF_FAILURES, SPOILT.format(kept.live.fqn or "the model"))
        return spoilt

    def _replay_waiting(self) -> None:
        """Replays those calls whose parameters are unsharded again; what is not finite then will not be later, so nobody looks twice."""
        for one in list(self._waiting):
            if parameter_not_here(one.kept.live.module):
                continue
            self._waiting.remove(one)
            if one.kept.is_spoilt():
                self._session.guard.tell(REPLAY_OF_FAILURES, SPOILT.format(one.kept.live.fqn or "the model"))
            else:
                self._replay(one.kept, one.why, backward=one.backward)

    def _calls_behind(self, gradient: Nonfinite) -> list[KeptCall]:
        """The calls through which a gradient may have come back, the likeliest first."""
        calls = [kept for kept in reversed(self._calls) if kept.step == gradient.step]
        if self._sharded:
            return self._calls_that_spoil(gradient, calls)
        calls = [
            kept for kept in calls if kept.live.gradients and kept.gets_finite_gradients()
        ]  # the others only propagate it
        if gradient.kind == "grad_output":  # made by the call itself, or by one after it
            return [kept for kept in reversed(calls) if kept.call >= gradient.call]
        return sorted(calls, key=lambda kept: not _has_bad_gradient(kept))

    def _calls_that_spoil(self, gradient: Nonfinite, calls: list[KeptCall]) -> list[KeptCall]:
        """Of ``calls``, in the order of the backward pass, the last one whose upstream gradients are finite before one where they are not."""
        last: KeptCall | None = None
        for kept in calls:
            if not kept.gets_finite_gradients():
                return [last] if last is not None else []  # else the loss itself was not finite
            if kept.live.gradients:
                last = kept
            if kept.live.fqn and kept.holds(kept.call, gradient.fqn):
                return [kept]
        return calls[:1] if last is None else [last]

    def _through(self, calls: list[KeptCall], why: str, error: tuple[str, str] | None) -> bool:
        """Replays the backward pass through ``calls``, until one of them shows what is looked for; whether one has."""
        for kept in calls:
            if why == "gradient" and self._is_spoilt_since(kept):
                continue
            found = bool(kept.live.gradients) and self._replay_or_wait(kept, why, backward=True, error=error)
            if found and why != "forced":
                return True
        return False

    def _scale_gradients(self) -> None:
        """Asks once whether gradients are zero because float16 has flushed them: pulls a multiplied gradient through the calls of this step."""
        calls = [kept for kept in self._calls if kept.live.gradients and not kept.old]
        if self._scales or not calls or not self._is_new(ZEROS):
            return
        for kept in reversed(calls):
            if self._replay_or_wait(kept, ZEROS, backward=True):
                return

    def _tell_gradients(self, replay: RepeatedCall, doubt: str) -> bool:
        """Writes how the gradients of a replay differ from those of a multiplied upstream gradient; whether there is something to write."""
        if doubt:
            self._session.guard.tell(REPLAY_OF_FAILURES, f"gradients were not computed again: {doubt}")
        elif replay.gradients:
            self._session.emit(ScaledBackward(scale=replay.scale, parameters=replay.gradients, of=UPSTREAM))
        return bool(replay.gradients) and not doubt

    def _replay_or_wait(
        self, kept: KeptCall, why: str, *, backward: bool = False, error: tuple[str, str] | None = None
    ) -> bool:
        """Makes the call again, as :meth:`_replay` does, or has it wait until its parameters are unsharded."""
        gone = parameter_not_here(kept.live.module) if self._sharded and kept.copies is None else ""
        if not gone:
            return self._replay(kept, why, backward=backward, error=error)
        if why in ("value", "gradient") and len(self._waiting) < MAX_WAITING:
            name = f"{kept.live.fqn}.{gone}" if kept.live.fqn else gone
            self._waiting.append(_Waiting(kept=kept, why=why, backward=backward, gone=name))
        return False

    def _replay(
        self, kept: KeptCall, why: str, *, backward: bool = False, error: tuple[str, str] | None = None
    ) -> bool:
        """Makes the call again; whether it has done what it did before, and has made the gradient that is looked for.

        Args:
            kept: the call.
            why: it is made again.
            backward: also pull the upstream gradient through it.
            error: what the backward pass has raised.
        """
        pass_ = why if why in (ZEROS, SILENT) else "backward" if backward else "forward"
        spent = why != "forced" and (self.count >= MAX_REPLAYS or self._spent > MAX_SECONDS)
        if spent or pass_ in kept.replayed:
            return False
        kept.replayed.add(pass_)
        self.count += 1
        began = perf_counter()
        ops = self._new_trace()
        ops.lines = {source_of(sys._getframe()): kept.line and kept.line.source}
        inner = (
            InnerCalls(
                self._session, _KINDS[why], min(self._capsule_limit, self._capsule_room), self._silent, kept.depth
            )
            if why in _KINDS and self._capsule_limit is not None
            else None
        )
        replay = RepeatedCall(
            self._session, kept, ops, inner, traced=why not in (ZEROS, SILENT), scaled=why == ZEROS, leaf=self._leaf,
            shown=self._shown if why == "raised" else nullcontext,
        )  # fmt: skip
        with kept.with_its_parameters(), self._aside(), self._modules.following(replay), self._phases.standing_aside():
            doubt = replay.run(kept.backward if backward else kept.number, backward=backward, error=error)
        self._spent += perf_counter() - began
        try:
            return self._tell_replay(kept, why, replay, inner, doubt)
        finally:
            replay.let_go()

    def _tell_replay(
        self, kept: KeptCall, why: str, replay: RepeatedCall, inner: InnerCalls | None, doubt: str
    ) -> bool:
        """Writes what a replay has shown; whether it went as the call did, and has made the gradient that is looked for."""
        if replay.why_not:
            name = kept.live.fqn or "the model"
            self._session.guard.tell(REPLAY_OF_FAILURES, f"a call of {name} cannot be made again: {replay.why_not}")
            return False
        if why == ZEROS:
            return self._tell_gradients(replay, doubt)
        if replay.capsule is not None and self._is_same_failure(kept, why, replay, inner, doubt):
            self._write_capsule(kept, *replay.capsule)
        eager = replay.in_eager_mode() if why == "value" and why_opaque(kept.live.module) else None
        if eager is not None:
            self._session.emit(eager, fqn="", at=(kept.step, kept.call))
            why, doubt, replay.compared = EAGER, "", False
        if why not in ("forced", SILENT):
            record = ReplayedCall(
                why=why,
                compared=replay.compared,
                doubt=doubt or None,
                late=kept.has_moved and kept.copies is None,
                copies=kept.copies is not None,
                rounds=replay.rounds,
            )
            self._session.emit(record, fqn=kept.live.fqn)
        return not doubt and (why != "gradient" or replay.is_bad)

    def _is_same_failure(
        self, kept: KeptCall, why: str, replay: RepeatedCall, inner: InnerCalls | None, doubt: str
    ) -> bool:
        """Whether a replay, which may have other results, has failed as the call did: else its capsule is one of another failure."""
        if why == "value" and inner is not None and not (replay.compared and not doubt):
            return replay.error is None and any(_are_nested(inner.began, fqn) for fqn in kept.bad)
        if why == "gradient":
            return replay.is_bad
        return not doubt and (replay.compared or why != SILENT)

    def _write_capsule(self, kept: KeptCall, description: dict[str, Any], tensors: bytes) -> None:
        """Writes the first capsule of a kind and an outermost call beside the trace; one inside of a later unit has only got what is not finite."""
        name = IN_PLACE.format(call=kept.call, kind=description["kind"])
        if name not in self.written:
            self.written[name] = bool(tensors)
            if tensors:
                self._capsule_room -= len(tensors)
                self._session.writer.write_beside(f"{name}.safetensors", tensors)
            self._session.writer.write_beside(f"{name}.json", to_json(description).encode("utf-8"))


def _are_nested(fqn: str, other: str) -> bool:
    return is_inside(fqn, other) or is_inside(other, fqn)


def is_inside(fqn: str, outer: str) -> bool:
    """Whether ``fqn`` names the module ``outer`` or one in it."""
    return not outer or fqn == outer or fqn.startswith(f"{outer}.")


def _by_reference(args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any], int]:
    """The arguments of a call, in containers of their own and without what their tensors were computed from, and the bytes of these."""
    size = 0
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor) and value.grad_fn is None:  # in most calls these are all
            size += value.numel() * value.element_size()
        elif value is not None:
            memo: dict[int, Any] = {}
            args, kwargs = mapped(tuple(args), _without_graph, memo), mapped(dict(kwargs), _without_graph, memo)
            return args, kwargs, bytes_of(tensor for _, tensor in inputs_in(args, kwargs))
    return tuple(args), dict(kwargs), size


def _without_graph(tensor: Tensor) -> Tensor:
    """A tensor by reference, and not what it was computed from: its graph holds parameters, which could not be swapped for others then."""
    if tensor.grad_fn is None:
        return tensor
    with out_of_their_sight(), DisableTorchFunction():
        return as_leaf(tensor)


def _comes_back(tensor: Tensor) -> bool:
    """Whether a backward pass makes a gradient of a tensor, and hands it on."""
    return tensor.requires_grad and not tensor.is_leaf


def _has_bad_gradient(kept: KeptCall) -> bool:
    """Whether a gradient of one of the parameters of a call, on a CPU, is not finite before it is reduced."""
    gradients = (parameter.grad for _, parameter in kept.live.parameters())
    return not all(gradient.is_cuda or is_finite(gradient) for gradient in gradients if gradient is not None)


def _is_failure(error: BaseException) -> bool:
    """Whether an exception may be about dtypes or values, and the device still answers."""
    if not isinstance(error, Exception) or isinstance(error, (*_NOT_FAILURES, CannotReplayError)):
        return False
    is_of_dead_device = isinstance(error, RuntimeError) and any(words in str(error) for words in _DEAD)
    return not (is_refusal_of_compiler(error) or is_of_dead_device)  # a replay is made in eager mode
