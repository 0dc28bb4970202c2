"""Changed scenarios: the references that runs are compared with, the building blocks of remedies, and the remedies.

A change gives an equal scenario where it has nothing to change.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtypedoctor.diagnosis.rule import Rule
from dtypedoctor.diagnosis.wording import indexed
from dtypedoctor.errors import UsageError
from dtypedoctor.plugins import KEEP_FLOAT32, Correction, correction_named, label_of, registered, remark, switched_off
from dtypedoctor.replay.capsule import MODEL
from dtypedoctor.scenario.model import Scenario, Script
from dtypedoctor.text import did_you_mean, quoted

_ONE_PASS = {"kind": "forward", "steps": 1, "batch_size": 1, "sequence_length": 2}


def healthy_reference(scenario: Scenario) -> Scenario | None:
    """The scenario with the changes under its ``reference``; None where it has none.

    Every model gets the reference's dtype, quantisation states included; autocast regions go unless they are kept,
    compilation stays unless it is taken away.
    """
    if scenario.reference is None:
        return None
    steps = scenario.model_dump()["steps"]
    for step in steps:
        if step["model"] is not None:
            step["model"]["dtype"] = scenario.reference.dtype
            if step["model"]["quantization"] is not None:
                step["model"]["quantization"] |= {"quant_state_dtype": None, "compute_dtype": None}
        if not scenario.reference.autocast:
            step["autocast"] = None
        if not scenario.reference.compile:
            step["compile"] = None
    return scenario.with_changes(steps=steps)


def float32_twin(scenario: Scenario) -> Scenario | None:
    """A run whose models compute in float32 with the weights of the scenario's; only their first outputs are wanted.

    None for scenarios that run a script, which builds its models itself, and for capsules, whose inputs belong to their dtype.
    """
    if is_script(scenario) or is_capsule(scenario):
        return None
    steps = [_in_float32(step) for step in scenario.model_dump()["steps"] if _builds_or_unloads(step)]
    return scenario.with_changes(steps=steps, corrections=[], conditions=[])


def is_script(scenario: Scenario) -> bool:
    """Whether the scenario runs a user's script, which builds its models itself."""
    return any(isinstance(step.workload, Script) for step in scenario.steps)


def is_switched_on(changed: Scenario, script: Scenario) -> bool:
    """Whether ``changed`` is the scenario ``script`` with something switched on in its process, not with another script."""
    return changed.steps == script.steps and changed != script


def is_capsule(scenario: Scenario) -> bool:
    """Whether the scenario makes the one call of a capsule."""
    return any(step.model is not None and step.model.name.startswith(MODEL) for step in scenario.steps)


def _builds_or_unloads(step: dict[str, Any]) -> bool:
    return step["model"] is not None or step["workload"]["kind"] == "unload"


def _in_float32(step: dict[str, Any]) -> dict[str, Any]:
    plain = {"name": step["name"], "workload": step["workload"]}
    if step["model"] is None:
        return plain
    return plain | {"model": step["model"] | {"float32_twin": True}, "workload": _ONE_PASS}


Change = Callable[[Scenario], Scenario]

HALF = ("float16", "bfloat16")


def all_of(*changes: Change) -> Change:
    """One change after the other."""

    def change(scenario: Scenario) -> Scenario:
        for one in changes:
            scenario = one(scenario)
        return scenario

    return change


def with_corrections(*corrections: str) -> Change:
    """Switches on corrections that are not on already."""

    def change(scenario: Scenario) -> Scenario:
        present = scenario.model_dump()["corrections"]
        known = {correction["id"] for correction in present}
        return scenario.with_changes(corrections=present + [{"id": c} for c in corrections if c not in known])

    return change


def with_conditions(*conditions: str) -> Change:
    """Switches conditions of the whole process that are not switched already."""

    def change(scenario: Scenario) -> Scenario:
        added = [name for name in conditions if name not in scenario.conditions]
        return scenario.with_changes(conditions=[*scenario.conditions, *added])

    return change


def from_outside(condition: str, otherwise: Change) -> Change:
    """Switches a condition of the process that runs a script; a scenario without one is changed ``otherwise``."""
    switch = with_conditions(condition)
    return lambda scenario: (switch if is_script(scenario) else otherwise)(scenario)


def in_scripts(fix: str, otherwise: Change) -> Change:
    """Puts the correction that ``fix`` means into the model of a script; a scenario without one is changed ``otherwise``."""
    name, modules = correction_named(fix)

    def switch(scenario: Scenario) -> Scenario:
        present = scenario.model_dump()["corrections"]
        return scenario.with_changes(corrections=[*present, {"id": name, "modules": modules}])

    return lambda scenario: (switch if is_script(scenario) else otherwise)(scenario)


def with_kernels(*ids: str) -> Change:
    """Switches on corrections of dtypedoctor's own kernels; a script has kernels of its own, so it stays as it is."""
    switch = with_corrections(*ids)
    return lambda scenario: scenario if is_script(scenario) else switch(scenario)


def with_model(**changes: Any) -> Change:
    """Sets fields of every model of the scenario."""

    def edit(step: dict[str, Any]) -> None:
        if step["model"] is not None:
            step["model"] |= changes

    return lambda scenario: _edited(scenario, edit)


def with_options(model: str, **options: Any) -> Change:
    """Sets options of every model of this name; others have no such options."""

    def edit(step: dict[str, Any]) -> None:
        if step["model"] is not None and step["model"]["name"] == model:
            step["model"]["options"] |= options

    return lambda scenario: _edited(scenario, edit)


def with_autocast(dtype: str | None) -> Change:
    """Opens an autocast region of ``dtype`` around every workload that computes, or closes all of them; a script has its own."""

    def edit(step: dict[str, Any]) -> None:
        if step["workload"]["kind"] not in ("unload", "script"):
            step["autocast"] = None if dtype is None else (step["autocast"] or {}) | {"dtype": dtype}

    return lambda scenario: _edited(scenario, edit)


def autocast_of_model(scenario: Scenario) -> Scenario:
    """Gives every autocast region the dtype of the model inside it, where that is a 16-bit one."""
    dtype = None

    def edit(step: dict[str, Any]) -> None:
        nonlocal dtype
        if step["model"] is not None:
            dtype = step["model"]["dtype"]
        if step["autocast"] is not None and dtype in HALF:
            step["autocast"]["dtype"] = dtype

    return _edited(scenario, edit)


def fresh_process(scenario: Scenario) -> Scenario:
    """Leaves only the last model and what is done with it: what came before happened in another process, so to say."""
    steps = scenario.model_dump()["steps"]
    last = max(index for index, step in enumerate(steps) if step["model"] is not None or index == 0)
    return scenario.with_changes(steps=steps[last:])


def _edited(scenario: Scenario, edit: Callable[[dict[str, Any]], None]) -> Scenario:
    steps = scenario.model_dump()["steps"]
    for step in steps:
        edit(step)
    return scenario.with_changes(steps=steps)


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
        by_hand: what to write in a script to the same effect, in Markdown, without a full stop; empty if a script cannot do it.
    """

    id: str
    summary: str
    safe: bool
    change: Change
    strict: bool = False
    prefer: str = ""
    by_hand: str = ""


_OWN = (
    Remedy(
        id="bfloat16",
        summary="load the model in bfloat16, which has float32's range",
        safe=True,
        change=in_scripts("bfloat16", otherwise=with_model(dtype="bfloat16")),
        prefer="the GPU knows bfloat16 and 8 bits of precision are enough: nothing has to be patched",
        by_hand="`dtype=torch.bfloat16` where the model is loaded, and `bf16=True` instead of `fp16=True` in a trainer's arguments",
    ),
    Remedy(
        id="autocast-dtype-of-model",
        summary="open the autocast region in the dtype of the model's own weights",
        safe=True,
        change=autocast_of_model,
        prefer="softmax, losses and float32 adapters are to be computed as autocast does it",
        by_hand="the model's dtype in `torch.autocast(device, dtype=...)`; in a trainer's arguments `bf16=True` or `fp16=True`",
    ),
    Remedy(
        id="autocast-off",
        summary="open no autocast region",
        safe=True,
        change=from_outside("autocast-off", otherwise=with_autocast(None)),
        prefer="everything has one dtype already, or casts are to be seen in the code",
        by_hand="no `torch.autocast`; in a trainer's arguments `bf16=False` and `fp16=False`",
    ),
    Remedy(
        id="autocast-bfloat16",
        summary="run under bfloat16 autocast, which casts whatever it meets, also what should have been an error",
        safe=False,
        change=with_autocast("bfloat16"),
        by_hand="`with torch.autocast(device, dtype=torch.bfloat16):` around the model's calls",
    ),
    Remedy(
        id="autocast-and-quant-state-dtype",
        summary="autocast-dtype-of-model and quant-state-dtype together",
        safe=True,
        change=all_of(autocast_of_model, with_corrections("quant-state-dtype")),
        prefer="both the region and the packed weights have another dtype than the activations",
        by_hand="what `autocast-dtype-of-model` and `quant-state-dtype` say",
    ),
    Remedy(
        id="fresh-process",
        summary="run the last model in a separate process",
        safe=True,
        change=fresh_process,
        prefer="the models need not share a process: no library has to change",
        by_hand="load each model in a process of its own",
    ),
    Remedy(
        id="eager-attention",
        summary="compute attention in steps, with torch's math backend and transformers' eager code, never in a fused kernel",
        safe=False,
        change=with_conditions("eager-attention"),
        by_hand='`attn_implementation="eager"` where the model is loaded',
    ),
    Remedy(
        id="compile-off",
        summary="run what torch.compile has made as the Python code that it is",
        safe=False,
        change=with_conditions("compile-off"),
        by_hand="no `torch.compile`; in a trainer's arguments `torch_compile=False`",
    ),
    Remedy(
        id="loss-scale-one",
        summary="hold the scale of every gradient scaler at 1; steps whose gradients are not finite are still skipped",
        safe=False,
        change=with_conditions("loss-scale-one"),
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
    return Remedy(id=name, summary=summary, safe=True, change=in_scripts(name, otherwise=lambda scenario: scenario))


def remedies() -> Mapping[str, Remedy]:
    """Every remedy by its id: those of dtypedoctor, each correction that needs no list of modules, those of plug-ins."""
    corrections = {one.id: _switching_on(one) for one in registered(Correction).values() if not one.needs_modules}
    everything = {**REMEDIES, **corrections, **registered(Remedy)}
    _remark_unknown_fixes({*everything, *registered(Correction)})
    return everything


def _remark_unknown_fixes(known: Collection[str]) -> None:
    """Names the plug-ins' findings that propose a fix which nobody has."""
    for rule in registered(Rule).values():
        for spec in rule.specs:
            for name in (*spec.proposed, *spec.settled_by):
                label = label_of(Rule, rule.name)
                if label and name not in known:
                    remark(
                        f"{label}: {spec.id} proposes the fix {quoted(name)}, which there is not{did_you_mean(name, known)}"
                    )


def _switching_on(correction: Correction) -> Remedy:
    switch = with_corrections if correction.in_scripts else with_kernels
    return Remedy(
        id=correction.id,
        summary=correction.summary,
        safe=correction.safe,
        change=switch(correction.id),
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

    @property
    def why_no_patch(self) -> str:
        """Why ``--patch`` has nothing to print for it, one sentence; empty if it has."""
        if self.edited:
            return ""
        if self.remedy.by_hand:
            return f"{self.remedy.id} is a change of your script, so no library has a line to patch: {self.remedy.by_hand}."
        if self.kept:
            return f"{self.remedy.id} changes a model in memory and has no form as an edit of a library: keep it with treat --with."
        instead = f": {', '.join(self.released)} edits a released one" if self.released else ""
        return f"{self.remedy.id} changes code of dtypedoctor's scenarios, not of a library{instead}."


def reaches() -> list[Reach]:
    """Every fix, in the order of :func:`dtypedoctor.trials.remedies.remedies`."""
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
    steps = [{"workload": {"kind": "script", "path": "train.py"}}]
    script = Scenario.model_validate({"name": "any", "summary": "any script", "steps": steps})
    tried = is_switched_on(remedy.change(script), script)
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
        raise UsageError(f"--patch: {found[name].why_no_patch}", f"Fixes that edit a library: {', '.join(editing)}.")
    return edited
