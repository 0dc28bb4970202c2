"""Fixes as a report and a person name them: what each changes, where it can be put in, and what asks ``exec`` for a run with it.

How a fix changes a scenario is in :mod:`dtypedoctor.lab.trials.changes`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dtypedoctor.diagnosis.wording import indexed
from dtypedoctor.errors import UsageError
from dtypedoctor.plugins import (
    KEEP_FLOAT32,
    Correction,
    Remedy,
    correction_named,
    registered,
    switched_off,
)
from dtypedoctor.text import did_you_mean

_OWN = (
    Remedy(
        id="bfloat16",
        summary="load the model in bfloat16, which has float32's range",
        safe=True,
        in_scripts=True,
        prefer="the GPU knows bfloat16 and 8 bits of precision are enough: nothing has to be patched",
        by_hand="`dtype=torch.bfloat16` where the model is loaded, and `bf16=True` instead of `fp16=True` in a trainer's arguments",
    ),
    Remedy(
        id="autocast-dtype-of-model",
        summary="open the autocast region in the dtype of the model's own weights",
        safe=True,
        prefer="softmax, losses and float32 adapters are to be computed as autocast does it",
        by_hand="the model's dtype in `torch.autocast(device, dtype=...)`; in a trainer's arguments `bf16=True` or `fp16=True`",
    ),
    Remedy(
        id="autocast-off",
        summary="open no autocast region",
        safe=True,
        in_scripts=True,
        prefer="everything has one dtype already, or casts are to be seen in the code",
        by_hand="no `torch.autocast`; in a trainer's arguments `bf16=False` and `fp16=False`",
    ),
    Remedy(
        id="autocast-bfloat16",
        summary="run under bfloat16 autocast, which casts whatever it meets, also what should have been an error",
        safe=False,
        by_hand="`with torch.autocast(device, dtype=torch.bfloat16):` around the model's calls",
    ),
    Remedy(
        id="autocast-and-quant-state-dtype",
        summary="autocast-dtype-of-model and quant-state-dtype together",
        safe=True,
        in_scripts=True,
        prefer="both the region and the packed weights have another dtype than the activations",
        by_hand="what `autocast-dtype-of-model` and `quant-state-dtype` say",
    ),
    Remedy(
        id="fresh-process",
        summary="run the last model in a separate process",
        safe=True,
        prefer="the models need not share a process: no library has to change",
        by_hand="load each model in a process of its own",
    ),
    Remedy(
        id="eager-attention",
        summary="compute attention in steps, with torch's math backend and transformers' eager code, never in a fused kernel",
        safe=False,
        in_scripts=True,
        by_hand='`attn_implementation="eager"` where the model is loaded',
    ),
    Remedy(
        id="compile-off",
        summary="run what torch.compile has made as the Python code that it is",
        safe=False,
        in_scripts=True,
        by_hand="no `torch.compile`; in a trainer's arguments `torch_compile=False`",
    ),
    Remedy(
        id="loss-scale-one",
        summary="hold the scale of every gradient scaler at 1; steps whose gradients are not finite are still skipped",
        safe=False,
        in_scripts=True,
        by_hand="`torch.amp.GradScaler(init_scale=1.0, growth_interval=10**9)`",
    ),
)

REMEDIES: dict[str, Remedy] = {remedy.id: remedy for remedy in _OWN}
"""The remedies that are no correction and fit any library, by id."""


ABLATIONS = {
    "autocast": "autocast-off",
    "fused-attention": "eager-attention",
    "compile": "compile-off",
    "loss-scale": "loss-scale-one",
}
"""What ``exec --ablate`` can take away, by name, and the id of the remedy that takes it away."""


def asked_for(ablated: Sequence[str], tried: Sequence[str]) -> list[str]:
    """Ids of the remedies that ``exec --ablate`` and ``exec --try`` name.

    Args:
        ablated: names, or ids, of ablations.
        tried: ids of any remedies, ablations among them.

    Raises:
        UsageError: there is no such ablation or remedy.
    """
    known = remedies()
    for name in ablated:
        if name not in ABLATIONS and name not in ABLATIONS.values():
            hint = f"Known: {', '.join(ABLATIONS)}."
            raise UsageError(
                f"--ablate: there is no ablation {name!r}{did_you_mean(name, ABLATIONS)}",
                f"Use --try {name}." if name in known else hint,
            )
    for name in tried:
        if name == KEEP_FLOAT32:
            raise UsageError("--try keep-float32: which modules?", "Name them: --try keep-float32:layers.3.mlp,lm_head")
        if remedy_named(name) is None:
            raise UsageError(
                f"--try: there is no fix {name!r}{did_you_mean(name, known)}",
                f"Known: {', '.join(known)}.{switched_off()}",
            )
    return list(dict.fromkeys([*(ABLATIONS.get(name, name) for name in ablated), *tried]))


def exec_option(remedy: str) -> tuple[str, str]:
    """The option of ``exec`` that runs a script again with a remedy, given by its id, and the option's value."""
    ablated = next((name for name, ablation in ABLATIONS.items() if ablation == remedy), None)
    return ("--try", remedy) if ablated is None else ("--ablate", ablated)


def remedy_named(name: str, class_of: Callable[[str], str] = lambda _: "") -> Remedy | None:
    """The remedy of this id, or ``keep-float32`` for the modules named behind a colon; None where there is none.

    Args:
        name: the id.
        class_of: the class of a module by its name, empty where that is not known: a dotted name alone does not say what is kept.
    """
    correction, modules = correction_named(name)
    if correction != KEEP_FLOAT32 or not modules:
        return remedies().get(name)
    classes = {module: class_of(module.removesuffix("::self")) for module in modules}
    shown = [f"{indexed(module)} ({cls})" if cls else indexed(module) for module, cls in classes.items()]
    summary = f"run {' and '.join(shown)} in float32: parameters, inputs and arithmetic"
    return Remedy(id=name, summary=summary, safe=True, in_scripts=True)


def remedies() -> Mapping[str, Remedy]:
    """Every remedy by its id: those of dtypedoctor, each correction that needs no list of modules, those of plug-ins."""
    corrections = {one.id: _switching_on(one) for one in registered(Correction).values() if not one.needs_modules}
    return {**REMEDIES, **corrections, **registered(Remedy)}


def _switching_on(correction: Correction) -> Remedy:
    return Remedy(
        id=correction.id,
        summary=correction.summary,
        safe=correction.safe,
        in_scripts=correction.in_scripts,
        strict=correction.strict,
        prefer=correction.prefer,
        by_hand=correction.by_hand,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """Where a fix can be put in.

    Attributes:
        remedy: the fix.
        tried_by: the option of ``exec`` that runs an unmodified script with it; empty where no option does.
        kept: ``treat --with`` keeps it in place.
        applied: ``dtypedoctor.apply`` puts it into a model.
        edited: the correction that edits a library's source, which ``explain --patch`` prints as a diff; None for other fixes.
        released: ids of the corrections of released libraries for the same findings, where this one is for scenarios only.
    """

    remedy: Remedy
    tried_by: str
    kept: bool
    applied: bool
    edited: Correction | None
    released: tuple[str, ...]

    @property
    def releases(self) -> str:
        """The library and the releases that it was tried on; empty for a fix of any library."""
        return f"{self.edited.library} {', '.join(self.edited.seen)}" if self.edited else ""


def reaches() -> list[Reach]:
    """Every fix, in the order of :func:`remedies`."""
    corrections = registered(Correction)
    return [_reach(remedy, corrections.get(name)) for name, remedy in remedies().items()]


def reach_of_modules(name: str) -> Reach | None:
    """Where ``keep-float32``, with or without modules behind a colon, can be put in; None for any other fix."""
    correction, modules = correction_named(name)
    if correction != KEEP_FLOAT32:
        return None
    remedy = remedy_named(f"{KEEP_FLOAT32}:{','.join(modules) or 'MODULE'}")
    return _reach(remedy, None) if remedy is not None else None  # `treat` takes no modules


def _reach(remedy: Remedy, correction: Correction | None) -> Reach:
    tried = remedy.in_scripts
    return Reach(
        remedy=remedy,
        tried_by=" ".join(exec_option(remedy.id)) if tried else "",
        kept=tried and correction is not None,
        applied=tried and correction_named(remedy.id)[0] in registered(Correction),
        edited=correction if correction is not None and correction.edits else None,
        released=_released(correction) if correction is not None and not tried else (),
    )


def _released(correction: Correction) -> tuple[str, ...]:
    """The corrections of released libraries for the findings of ``correction``."""
    everything = registered(Correction).values()
    return tuple(one.id for one in everything if one.edits and _findings(one) & _findings(correction))


def _findings(correction: Correction) -> set[str]:
    return {finding for finding, _ in correction.fixes} | set(correction.proves)


def edits_of(name: str) -> Correction:
    """The correction of a library that ``explain --patch`` names.

    Raises:
        UsageError: there is no such fix, or it edits no library; the message says what to do instead.
    """
    found = {one.remedy.id: one for one in reaches()}
    editing = [one for one, reach in found.items() if reach.edited]
    if name not in found:
        raise UsageError(
            f"--patch: there is no fix {name!r}{did_you_mean(name, editing)}", f"Known: {', '.join(editing)}."
        )
    edited = found[name].edited
    if edited is None:
        hint = f"`dtypedoctor explain {name}` says where it is put in. Fixes that edit a library: {', '.join(editing)}."
        raise UsageError(f"--patch: {name} edits no library", hint)
    return edited
