"""Remedies: changes of a scenario that may cure a finding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtypedoctor.errors import UsageError
from dtypedoctor.plugins import Correction, registered
from dtypedoctor.trials.changes import (
    Change,
    all_of,
    autocast_of_model,
    fresh_process,
    from_outside,
    with_autocast,
    with_conditions,
    with_corrections,
    with_kernels,
    with_model,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change of a scenario.

    Attributes:
        id: kebab-case id.
        summary: what it changes, one sentence.
        safe: whether it keeps the meaning of the run; an unsafe one casts what disagrees without a word, or takes away what
            the program asks for, so it may hide a failure instead of curing it.
        change: gives the changed scenario.
        strict: it is not there to cure but to raise where the others would cast.
        prefer: the end of *prefer it if …*, where several remedies cure; empty for those that do not keep the meaning of the run.
    """

    id: str
    summary: str
    safe: bool
    change: Change
    strict: bool = False
    prefer: str = ""


_OWN = (
    Remedy(
        id="bfloat16",
        summary="load the model in bfloat16, which has float32's range",
        safe=True,
        change=with_model(dtype="bfloat16"),
        prefer="the GPU knows bfloat16 and 8 bits of precision are enough: nothing has to be patched",
    ),
    Remedy(
        id="autocast-dtype-of-model",
        summary="open the autocast region in the dtype of the model's own weights",
        safe=True,
        change=autocast_of_model,
        prefer="softmax, losses and float32 adapters are to be computed as autocast does it",
    ),
    Remedy(
        id="autocast-off",
        summary="open no autocast region",
        safe=True,
        change=from_outside("autocast-off", otherwise=with_autocast(None)),
        prefer="everything has one dtype already, or casts are to be seen in the code",
    ),
    Remedy(
        id="autocast-bfloat16",
        summary="run under bfloat16 autocast, which casts whatever it meets, also what should have been an error",
        safe=False,
        change=with_autocast("bfloat16"),
    ),
    Remedy(
        id="autocast-and-quant-state-dtype",
        summary="autocast-dtype-of-model and quant-state-dtype together",
        safe=True,
        change=all_of(autocast_of_model, with_corrections("quant-state-dtype")),
        prefer="both the region and the packed weights have another dtype than the activations",
    ),
    Remedy(
        id="fresh-process",
        summary="run the last model in a process of its own",
        safe=True,
        change=fresh_process,
        prefer="the models need not share a process: no library has to change",
    ),
    Remedy(
        id="eager-attention",
        summary="compute attention in steps, with torch's math backend and transformers' eager code, never in a fused kernel",
        safe=False,
        change=with_conditions("eager-attention"),
    ),
    Remedy(
        id="compile-off",
        summary="run what torch.compile has made as the Python code that it is",
        safe=False,
        change=with_conditions("compile-off"),
    ),
    Remedy(
        id="loss-scale-one",
        summary="hold the scale of every gradient scaler at 1; steps whose gradients are not finite are still skipped",
        safe=False,
        change=with_conditions("loss-scale-one"),
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
                f"--ablate: there is no ablation {name!r}", f"Use --try {name}." if name in known else hint
            )
    for name in tried:
        if name not in known:
            raise UsageError(f"--try: there is no fix {name!r}", f"Known: {', '.join(known)}.")
    return list(dict.fromkeys([*(ABLATIONS.get(name, name) for name in ablated), *tried]))


def exec_option(remedy: str) -> tuple[str, str]:
    """The option of ``exec`` that runs a script again with a remedy, given by its id, and the option's value."""
    ablated = next((name for name, ablation in ABLATIONS.items() if ablation == remedy), None)
    return ("--try", remedy) if ablated is None else ("--ablate", ablated)


def remedies() -> Mapping[str, Remedy]:
    """Every remedy by its id: those of dtypedoctor, each correction that needs no list of modules, those of plug-ins."""
    corrections = {one.id: _switching_on(one) for one in registered(Correction).values() if not one.needs_modules}
    return {**REMEDIES, **corrections, **registered(Remedy)}


def _switching_on(correction: Correction) -> Remedy:
    switch = with_corrections if correction.in_scripts else with_kernels
    return Remedy(
        id=correction.id,
        summary=correction.summary,
        safe=correction.safe,
        change=switch(correction.id),
        strict=correction.strict,
        prefer=correction.prefer,
    )
