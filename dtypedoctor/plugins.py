"""What dtypedoctor is made of and other packages add to: formats, models, workloads, corrections, checks, rules.

Everything is registered in the same way, whoever wrote it: a frozen dataclass of this module, held by a module that need not
import torch. Code that does import torch is named as ``"package.module:name"`` and imported by the worker when it is needed,
so the command line stays fast. A package names its dataclasses as entry points (see ``docs/extending.md``), dtypedoctor
its own in :data:`_OWN`; the five public tickets name theirs in ``dtypedoctor.lab.tickets``.

A plug-in that cannot be used is left out and named: :func:`left_out`.
"""

import importlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

SWITCH = "DTYPEDOCTOR_PLUGINS"
"""Environment variable that switches other packages' plug-ins off where it is ``0``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of reports.

    Attributes:
        name: what stands after ``--format``.
        suffix: of a file in this format, with its dot.
        render: the text of a :class:`dtypedoctor.report.document.Document`. The document is redacted before, but its texts may hold anything, markup included.
    """

    name: str
    suffix: str
    render: Callable[[Any], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A small model that is built without a download.

    Attributes:
        name: what stands after ``builtin:`` in a scenario.
        build: ``"package.module:function"``, which takes the scenario's ``options`` as keyword arguments and returns a
            ``torch.nn.Module`` on the CPU, in float32. Token ids reach from 0 to ``config.vocab_size``.
        finished: the function also takes ``dtype`` and ``seed`` and returns a model that must not be cast, packed or
            adapted any more.
        case: name of a shipped scenario that shows what the model is there for; ``bisect --model`` takes its settings.
        stream_choosers: each a ``"package.module:function"`` that takes a device and returns the ``ctypes.c_void_p`` of the CUDA
            stream on which a kernel of this model is launched next. Only such launches can be compared with the current stream.
        needs: top-level names of packages that ``build`` imports and that may be missing; without them the model is refused
            before anything is imported.
    """

    name: str
    build: str
    finished: bool = False
    case: str | None = None
    stream_choosers: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Something that is done with a model.

    Attributes:
        name: the ``kind`` of a workload that comes with dtypedoctor; of any other, the ``name`` beside ``kind: plugin``.
        run: ``"package.module:function"``, which takes a :class:`dtypedoctor.lab.workloads.context.Context`.
        needs: packages that it imports, as :attr:`Model.needs`.
    """

    name: str
    run: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Lines of a released library's function that become others; :mod:`dtypedoctor.source_edits` says how.

    Attributes:
        module: dotted name of the module that defines the function.
        function: its name, with its class where it has one.
        parameters: names of its parameters, where more may follow. Where they differ, the edit is not made.
        old: whole lines, however deep they are indented; the function must have them exactly once.
        new: what stands in their place.
        acts: an expression, evaluated before ``new``, that is true where the edit changes what is computed; empty: always.
    """

    module: str
    function: str
    parameters: tuple[str, ...]
    old: str
    new: str
    acts: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """Corrective code that is put into a live model, and the fix that consists of switching it on.

    Attributes:
        id: kebab-case id, used in ``corrections:`` of a scenario and as the id of the fix.
        summary: what it changes, one sentence in the imperative, without a capital and a full stop.
        install: ``"package.module:function"``, which takes the model and the dotted module names of the scenario's entry
            (often none) and returns a :class:`dtypedoctor.corrections.contract.Installed`; it raises
            :class:`dtypedoctor.corrections.contract.TargetMismatchError` where the code is not what it was written for.
        fixes: the findings for which it is proposed as a fix, each with the name of the module class that the finding must
            originate in ("" for any class).
        proves: the findings whose cause is proven where this correction alone makes them disappear.
        safe: it keeps the meaning of the run; False where it casts silently what should perhaps have raised.
        prefer: when to prefer this fix; the end of the sentence *prefer it when …*. Empty for none.
        by_hand: what to write in a script to the same effect, in Markdown, without a full stop; empty if a script cannot do it.
        strict: it is not there to fix but to raise where others would cast.
        in_scripts: it may fit a model that a script has built; False for code that only builtin models run.
        needs_modules: it must be told which modules, so it is no fix by itself: scenarios and ``bisect`` name them.
        edits: instead of ``install``, what becomes of the source of a released library, as soon as that is imported.
        library: the library of ``edits``, as it is imported. The correction is proposed where a finding's line is in it.
        seen: releases of ``library`` that it was tried on. In others it is made too, where their lines are the same.
        test: a test file for the library, which fails without the correction: name of a resource beside the declaration.
    """

    id: str
    summary: str
    install: str = ""
    fixes: tuple[tuple[str, str], ...] = ()
    proves: tuple[str, ...] = ()
    safe: bool = True
    prefer: str = ""
    by_hand: str = ""
    strict: bool = False
    in_scripts: bool = True
    needs_modules: bool = False
    edits: tuple[Edit, ...] = ()
    library: str = ""
    seen: tuple[str, ...] = ()
    test: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What watches a run for a failure that the trace would not show otherwise; a :class:`~dtypedoctor.diagnosis.rule.Rule` reads what it has written.

    Attributes:
        name: kebab-case name.
        observe: ``"package.module:Class"``, a subclass of :class:`dtypedoctor.instrument.silent.observer.Observer`.
        records: what it writes: frozen dataclasses with a ``KIND``, their name on disk, which no other record has.
    """

    name: str
    observe: str
    records: tuple[type, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A fix: a change of what is run.

    Attributes:
        id: kebab-case id.
        summary: what it changes, one sentence.
        safe: whether it keeps the meaning of the run; an unsafe one casts what disagrees without a word, or takes away what
            the program asks for, so it may hide a failure instead of curing it.
        change: gives the changed scenario; None for those that come with dtypedoctor, whose changes are in the laboratory.
        in_scripts: ``exec`` can try it on a script, because it can be switched on from outside.
        strict: it is not there to cure but to raise where the others would cast.
        prefer: the end of *prefer it if …*, where several remedies cure; empty for those that do not keep the meaning of the run.
        by_hand: what to write in a script to the same effect, in Markdown, without a full stop; empty if a script cannot do it.
    """

    id: str
    summary: str
    safe: bool
    change: Callable[[Any], Any] | None = None
    in_scripts: bool = False
    strict: bool = False
    prefer: str = ""
    by_hand: str = ""


BUILTIN = "builtin:"
"""How the name of a model begins that is registered."""
KEEP_FLOAT32 = "keep-float32"
_SHORT = {"bfloat16": "bfloat16-weights"}
"""Fixes of which a live model gets the correction that does the same."""


def correction_named(fix: str) -> tuple[str, list[str]]:
    """The id of the correction that a fix means for a live model, and its modules: ``keep-float32:layers.3.mlp,lm_head``.

    ``bfloat16`` means ``bfloat16-weights``. A module may be typed as a report shows it: ``model[1].up`` is ``1.up``.
    """
    name, _, modules = fix.partition(":")
    named = [re.sub(r"^model(?=\[)", "", module.strip()) for module in modules.split(",") if module.strip()]
    return _SHORT.get(name, name), [re.sub(r"\[(\d+)\]", r".\1", module).lstrip(".") for module in named]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A plug-in that is not used.

    Attributes:
        what: its entry point, or what it registers, with the distribution that it comes from.
        why: one sentence without a full stop.
    """

    what: str
    why: str

    @property
    def gap(self) -> str:
        """A line of what a report says was not covered."""
        return f"{self.what}: it cannot be used: {self.why}"


Registered = TypeVar("Registered")

_OWN: Mapping[str, tuple[str, ...]] = {
    "dtypedoctor.formats": ("dtypedoctor.report.formats:FORMATS",),
    "dtypedoctor.models": ("dtypedoctor.lab.models:MODELS",),
    "dtypedoctor.workloads": ("dtypedoctor.lab.workloads:WORKLOADS",),
    "dtypedoctor.corrections": ("dtypedoctor.lab.corrections:CORRECTIONS",),
}
"""Where dtypedoctor's own are declared, by the group of entry points that others use."""

_GUESTS = "dtypedoctor.lab.tickets:ENTRY_POINTS"
"""Of the same form, for the public tickets."""


def registered(kind: type[Registered]) -> Mapping[str, Registered]:
    """Everything of one kind by its name (its id): dtypedoctor's own first, then that of plug-ins, sorted by entry point.

    Kinds are the dataclasses of this module and :class:`dtypedoctor.diagnosis.rule.Rule`. Plug-ins are imported by the first call for their kind, and kept.
    """
    return cast(Mapping[str, Registered], _collected(kind)[0])


def left_out() -> tuple[LeftOut, ...]:
    """The plug-ins that this process has tried to use and could not."""
    return (*(one for _, wrong in _loaded.values() for one in wrong), *_given_up.values())


def give_up(what: str, error: Exception) -> None:
    """Names a plug-in that was loaded and failed when it was used."""
    _given_up.setdefault(what, LeftOut(what=what, why=f"{type(error).__name__}: {error}"))


def label_of(kind: type, name: str) -> str:
    """The entry point and the distribution that a plug-in comes from; empty for what comes with dtypedoctor."""
    return _labels.get((kind, name), "")


def switched_off() -> str:
    """A sentence that says so where plug-ins are switched off, with a space before it; else an empty text."""
    return f" Plug-ins are off ({SWITCH}=0)." if os.environ.get(SWITCH) == "0" else ""


def known(kind: type[Registered], prefix: str = "") -> str:
    """A hint for whoever has asked for something that is not registered: what is, and what was left out."""
    found, wrong = _collected(kind)
    missing = "".join(f" Not used: {one.what}: {one.why}." for one in wrong)
    return f"Known: {', '.join(prefix + name for name in found)}.{missing}{switched_off()}"


def own_code() -> Iterator[str]:
    """The references of all code that dtypedoctor's own declarations name, for a process that imports it in advance."""
    for group in _OWN:
        for one in _own(group):
            yield from (getattr(one, name) for name in ("build", "run", "install") if getattr(one, name, ""))


def resolve(reference: str) -> Any:
    """What ``"package.module:name"`` names.

    Raises:
        ImportError: there is no such module, or it has no such name.
    """
    module, _, name = reference.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError as error:
        raise ImportError(f"{module} has no {name!r}") from error


_given_up: dict[str, LeftOut] = {}
"""The plug-ins that have failed when they were used, by what they are."""
_loaded: dict[type, tuple[dict[str, Any], tuple[LeftOut, ...]]] = {}
"""By each kind that somebody has asked for: what is registered, and what was left out."""


_labels: dict[tuple[type, str], str] = {}
"""By kind and name, where each plug-in comes from."""


def _collected(kind: type) -> tuple[dict[str, Any], tuple[LeftOut, ...]]:
    if kind not in _loaded:
        _loaded[kind] = _load(kind)
    return _loaded[kind]


def _load(kind: type) -> tuple[dict[str, Any], tuple[LeftOut, ...]]:
    group = f"dtypedoctor.{kind.__name__.lower()}s".replace("ys", "ies")
    found = {_name(one): one for one in _own(group)}
    wrong: list[LeftOut] = []
    for label, entry in _entry_points(group):
        try:
            declared = _declared(entry, kind)
        except (Exception, SystemExit) as error:  # noqa: BLE001  (somebody else's package must not end the run)
            wrong.append(LeftOut(what=label, why=f"{type(error).__name__}: {error}"))
            continue
        for one in declared:
            if _name(one) in found:
                wrong.append(LeftOut(what=label, why=f"{_name(one)!r} is registered already; give it another name"))
            else:
                found[_name(one)] = one
                _labels[kind, _name(one)] = label
    return found, tuple(wrong)


def _own(group: str) -> Iterator[Any]:
    for reference in (*_OWN.get(group, ()), *resolve(_GUESTS).get(group, ())):
        yield from resolve(reference)


def _entry_points(group: str) -> Iterator[tuple[str, importlib.metadata.EntryPoint]]:
    """The entry points of a group with a label for each, the same on every machine; none where they are switched off."""
    if os.environ.get(SWITCH) == "0":
        return
    everything = importlib.metadata.entry_points()
    for entry in sorted(everything.select(group=group), key=lambda entry: (entry.name, entry.value)):
        of = f" of {entry.dist.name} {entry.dist.version}" if entry.dist is not None else ""
        yield f"{entry.group} plug-in {entry.name!r}{of}", entry


def _declared(entry: importlib.metadata.EntryPoint, kind: type) -> tuple[Any, ...]:
    """What an entry point names: one dataclass, or several in a list or tuple.

    Raises:
        TypeError: it is something else.
    """
    value = entry.load()
    several = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for one in several:
        if not isinstance(one, kind):
            raise TypeError(f"{entry.value} is {type(one).__name__}, not {kind.__module__}.{kind.__name__}")
    return several


def _name(one: Any) -> str:
    return str(getattr(one, "id", None) or one.name)
