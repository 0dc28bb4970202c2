"""What is changed in a process from outside: ablations of all of it, and corrections in its models.

An ablation is switched on as soon as the module that it patches is imported, and counts how often it made a difference: ``autocast-off``,
``eager-attention``, ``compile-off``, ``loss-scale-one``. Corrections are put into models, verified, counted and undone.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.amp.autocast_mode import autocast
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtypedoctor._torch_private import (
    COMPILER,
    SCALER_BEGINS,
    asked_for_compiled,
    attention_choice,
    fix_scale,
    region_is_on,
    set_region,
)
from dtypedoctor.corrections.contract import Counters, Installed, put_in
from dtypedoctor.errors import UsageError
from dtypedoctor.interruptions import contained, noticing
from dtypedoctor.lab.corrections.treated import EditedLibrary
from dtypedoctor.plugins import Correction as CorrectionOfLibrary
from dtypedoctor.plugins import left_out, registered
from dtypedoctor.trace.events import Condition as ConditionRecord
from dtypedoctor.trace.events import Correction, NotWatched
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.worker.on_import import after_import

if TYPE_CHECKING:
    from dtypedoctor.lab.scenarios.model import CorrectionSpec


TookEffect = Callable[[], None]
"""Called each time something went another way than it would have gone."""

Switch = Callable[[TookEffect], AbstractContextManager[None]]
"""Inside the context manager that it returns the condition is in force; leaving puts everything back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Something that holds for the whole process and can be switched from outside, whatever code runs in it.

    Attributes:
        id: kebab-case id, used in ``conditions:`` of a scenario.
        switches: by the name of the module that each takes hold of; none of these is imported for the condition's sake.
        without_effect: why it took no effect where it took none.
    """

    id: str
    switches: Mapping[str, Switch]
    without_effect: str


class Conditions:
    """The conditions of one process.

    Args:
        writer: where it is recorded which took effect, the first time and at the end.
        wanted: their ids.
    """

    def __init__(self, writer: TraceWriter, wanted: Sequence[str]) -> None:
        self._writer = writer
        self._effects = Counter(dict.fromkeys(wanted, 0))
        self._reasons = {name: CONDITIONS[name].without_effect for name in wanted}
        self._in_force = ExitStack()
        self._waiting: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Switches each on as soon as the module is there that it takes hold of."""
        for name in self._effects:
            for module, switch in CONDITIONS[name].switches.items():
                self._waiting.append(after_import(module, partial(self._switch, name, switch)))

    def end(self) -> None:
        """Puts everything back, and records what each has done."""
        for stop_waiting in self._waiting:
            stop_waiting()
        self._in_force.close()
        for name in self._effects:
            self._record(name)

    def _switch(self, name: str, switch: Switch) -> None:
        with contained() as ours:  # another version of the library; that must not end the program
            self._in_force.enter_context(switch(partial(self._took_effect, name)))
        if ours.error is not None:
            self._reasons[name] = f"it could not be switched: {type(ours.error).__name__}: {ours.error}"

    def _took_effect(self, name: str) -> None:
        self._effects[name] += 1
        if self._effects[name] == 1:  # at once: the process may be killed
            self._record(name)

    def _record(self, name: str) -> None:
        effects = self._effects[name]
        reason = "" if effects else self._reasons[name]
        self._writer.write(ConditionRecord(n=self._writer.next_n(), id=name, effects=effects, reason=reason))


@contextmanager
def replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Inside, ``owner.name`` is ``replacement``; ``owner`` is a class or a module that has that attribute itself."""
    original = owner.__dict__[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _autocast_off(took_effect: TookEffect) -> Iterator[None]:
    """Where regions are entered is where all of them meet: with statements, decorators, trainers, custom functions, graphs."""
    enter, leave = autocast.__enter__, autocast.__exit__
    wanted: WeakKeyDictionary[autocast, list[bool]] = WeakKeyDictionary()

    @wraps(enter)
    def __enter__(region: autocast) -> Any:  # noqa: N807
        wanted.setdefault(region, []).append(region_is_on(region))
        set_region(region, False)
        entered = enter(region)
        asked = wanted[region][-1]
        if asked and not torch.is_autocast_enabled(region.device):
            took_effect()
        return entered

    @wraps(leave)
    def __exit__(region: autocast, *how: Any) -> Any:  # noqa: N807
        """A region can be entered again: a decorator's is, at each call."""
        left = leave(region, *how)
        if wanted.get(region):
            set_region(region, wanted[region].pop())
        return left

    with replaced(autocast, "__enter__", __enter__), replaced(autocast, "__exit__", __exit__):
        yield


AUTOCAST_OFF = Condition(
    id="autocast-off",
    switches={"torch": _autocast_off},
    without_effect="no autocast region that casts was opened",
)


EAGER = "eager"


@contextmanager
def _attention_in_steps(took_effect: TookEffect) -> Iterator[None]:
    """torch's function chooses a fused kernel by itself, or one that the program names; here neither is asked."""
    fused = functional.scaled_dot_product_attention

    @wraps(fused, assigned=("__doc__",), updated=())
    def scaled_dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and _would_be_fused(*args, **kwargs):
            took_effect()
        with sdpa_kernel(SDPBackend.MATH):
            return fused(*args, **kwargs)

    with replaced(functional, "scaled_dot_product_attention", scaled_dot_product_attention):
        yield


def _would_be_fused(*args: Any, **kwargs: Any) -> bool:
    with suppress(RuntimeError, TypeError):  # operands that are refused are refused by the call itself
        return bool(attention_choice(*args, **kwargs) != SDPBackend.MATH.value)
    return False


@contextmanager
def _eager_models(took_effect: TookEffect) -> Iterator[None]:
    """A model of transformers asks its configuration which attention to run, and makes its masks for that one."""
    from transformers.modeling_utils import PreTrainedModel

    build = PreTrainedModel.__init__

    @wraps(build)
    def __init__(model: PreTrainedModel, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        build(model, *args, **kwargs)
        if model.config._attn_implementation not in (None, EAGER):
            model.config._attn_implementation = EAGER
            took_effect()

    with replaced(PreTrainedModel, "__init__", __init__):
        yield


EAGER_ATTENTION = Condition(
    id="eager-attention",
    switches={"torch": _attention_in_steps, "transformers.modeling_utils": _eager_models},
    without_effect="no fused attention was called, and no model of transformers was built for one (calls inside compiled code "
    "are not counted)",
)


@contextmanager
def _forced_eager(took_effect: TookEffect) -> Iterator[None]:
    owner, name = asked_for_compiled()
    ask = getattr(owner, name)

    @wraps(ask)
    def chosen(callback: Any) -> Any:
        """torch asks this whenever a compiled function is entered; the answer None means that its Python code runs."""
        answer = ask(callback)
        if callback not in (None, False) and answer is None:
            took_effect()
        return answer

    with (
        replaced(owner, name, chosen),
        torch.compiler.set_stance("force_eager"),
    ):
        yield


COMPILE_OFF = Condition(
    id="compile-off",
    switches={COMPILER: _forced_eager},
    without_effect="nothing that torch.compile has made was called",
)


@contextmanager
def _scale_at_one(took_effect: TookEffect) -> Iterator[None]:
    build, load, update = GradScaler.__init__, GradScaler.load_state_dict, GradScaler.update
    begin = getattr(GradScaler, SCALER_BEGINS)

    @wraps(build)
    def __init__(scaler: GradScaler, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        build(scaler, *args, **kwargs)
        _pin_scale(scaler)

    @wraps(load)
    def load_state_dict(scaler: GradScaler, state_dict: dict[str, Any]) -> None:
        load(scaler, state_dict)
        _pin_scale(scaler)

    @wraps(begin)
    def begin_at_one(scaler: GradScaler, *args: Any) -> None:
        begin(scaler, *args)  # called once by each scaler that is used: its scale is 1 from here on
        took_effect()

    @wraps(update)
    def update_(scaler: GradScaler, new_scale: float | Tensor | None = None) -> None:
        """A scale that the program names is as much another one as a scale that has grown."""
        update(scaler, None if new_scale is None else 1.0)

    with (
        replaced(GradScaler, "__init__", __init__),
        replaced(GradScaler, "load_state_dict", load_state_dict),
        replaced(GradScaler, SCALER_BEGINS, begin_at_one),
        replaced(GradScaler, "update", update_),
    ):
        yield


def _pin_scale(scaler: GradScaler) -> None:
    if scaler.is_enabled():
        fix_scale(scaler, 1.0)


LOSS_SCALE_ONE = Condition(
    id="loss-scale-one",
    switches={"torch": _scale_at_one},
    without_effect="no enabled GradScaler of torch has scaled a loss",
)


CONDITIONS: dict[str, Condition] = {
    condition.id: condition for condition in (AUTOCAST_OFF, EAGER_ATTENTION, COMPILE_OFF, LOSS_SCALE_ONE)
}
"""Every condition by its id; the same ids as ``ConditionName`` of a scenario."""


class StageCorrections:
    """Installs all corrections of a scenario in each model that it builds.

    Args:
        writer: where it is recorded what was installed, or why not.
        specs: the corrections of the scenario.
    """

    def __init__(self, writer: TraceWriter, specs: "Sequence[CorrectionSpec]") -> None:
        self._writer = writer
        self._specs = specs
        self._installed: dict[str, list[Installed]] = {}

    @property
    def counters(self) -> list[Counters]:
        """What counts the elements that each installed correction has changed."""
        return [one.counters for several in self._installed.values() for one in several]

    def install(self, model: nn.Module) -> None:
        """Installs them in ``model``; those in the model before it are taken out first.

        Raises:
            UsageError: there is no such correction.
            Exception: it does not fit the model.
        """
        self.take_out()
        for spec in self._specs:
            self._install(spec, model)

    def take_out(self) -> None:
        """Takes all of them out again."""
        for one in reversed([one for several in self._installed.values() for one in several]):
            one.undo()

    def conclude(self) -> None:
        """Records what each has done, in all models."""
        for name, several in self._installed.items():
            self._writer.write(_record(self._writer, name, several))

    def _install(self, spec: "CorrectionSpec", model: nn.Module) -> None:
        record = Correction(n=self._writer.next_n(), id=spec.id, target="", installed=False)

        def refused(error: Exception) -> None:
            if not isinstance(error, UsageError):
                self._writer.write(replace(record, reason=f"{type(error).__name__}: {error}"))

        with noticing(refused, Exception):
            installed = put_in(spec.id, model, spec.modules)
        self._installed.setdefault(spec.id, []).append(installed)
        self._writer.write(replace(record, target=installed.target, installed=True, proof=installed.proof))


class OutsideCorrections:
    """Installs each correction in the first outermost module of a script that it fits, when that is first called.

    Args:
        writer: where it is recorded what was installed, or why not.
        wanted: ``id`` and ``modules`` of each correction, as in a scenario.
    """

    def __init__(self, writer: TraceWriter, wanted: Iterable[Mapping[str, Any]]) -> None:
        self._writer = writer
        self._waiting = {spec["id"]: spec["modules"] for spec in wanted}
        self._reasons = dict.fromkeys(self._waiting, "the script has not called any module")
        self._installed: dict[str, Installed] = {}
        self._offered: WeakSet[nn.Module] = WeakSet()

    def offer(self, module: nn.Module) -> None:
        """An outermost module is about to be called."""
        if not self._waiting or module in self._offered:
            return
        self._offered.add(module)
        for name, modules in list(self._waiting.items()):
            with contained() as ours:
                self._installed[name] = put_in(name, module, modules)
            if ours.error is not None:  # it does not fit here; perhaps it fits the next model
                self._reasons[name] = f"{type(ours.error).__name__}: {ours.error}"
            else:
                del self._waiting[name]
                self._record(name)

    def conclude(self) -> None:
        """The script has ended: records what the corrections did, and those that could not be installed."""
        for name in self._installed:
            self._record(name)
        record_left_out(self._writer)
        for name in self._waiting:
            self._writer.write(
                Correction(n=self._writer.next_n(), id=name, target="", installed=False, reason=self._reasons[name])
            )
        for installed in reversed(list(self._installed.values())):
            installed.undo()

    def _record(self, name: str) -> None:
        self._writer.write(_record(self._writer, name, [self._installed[name]]))


class Changes:
    """What a request changes in the process of a script: conditions of all of it, libraries as they are imported, corrections in its models.

    Args:
        writer: where it is recorded what took effect, and why not.
        scenario: of the request, with its ``conditions`` and ``corrections``.
    """

    def __init__(self, writer: TraceWriter, scenario: Mapping[str, Any]) -> None:
        self._writer = writer
        specs = {spec["id"]: spec for spec in scenario.get("corrections", ())}
        known = registered(CorrectionOfLibrary)
        self._edited = [
            EditedLibrary(name, one.library, one.edits, counted=True, changed=lambda edited: edited.record(writer))
            for name in specs
            if (one := known.get(name)) is not None and one.edits
        ]
        for library in self._edited:
            del specs[library.name]
        self._corrections = OutsideCorrections(writer, specs.values()) if specs else None
        self._conditions = Conditions(writer, scenario.get("conditions", ()))

    def begin(self) -> None:
        """Puts everything in place, or waits for what it changes."""
        for library in self._edited:
            library.begin()
        self._conditions.begin()

    def offer(self, module: nn.Module) -> None:
        """An outermost module is about to be called."""
        if self._corrections is not None:
            self._corrections.offer(module)

    def end(self) -> None:
        """Records what each has done, and puts everything back."""
        for library in self._edited:
            library.record(self._writer)
        if self._corrections is not None:
            self._corrections.conclude()
        self._conditions.end()


def record_left_out(writer: TraceWriter) -> None:
    """Records the plug-ins that cannot be used."""
    for one in left_out():
        writer.write(NotWatched(what=one.what, why=f"it cannot be used: {one.why}"))


def _record(writer: TraceWriter, name: str, several: Sequence[Installed]) -> Correction:
    """What a correction has done so far wherever it was installed, the last place of which is named."""
    return Correction(
        n=writer.next_n(),
        id=name,
        target=several[-1].target,
        installed=True,
        proof=several[-1].proof,
        hits=sum(one.counters.hits for one in several),
        rescued=sum(one.counters.elements("rescued") for one in several),
        clamped=sum(one.counters.elements("clamped") for one in several),
    )
