"""Autocast regions: ops they do not reach, functions that lose or re-enter them, regions for another device or model."""

from collections.abc import Iterator
from dataclasses import replace

from dtypedoctor.diagnosis.ops import overload_free, writes
from dtypedoctor.diagnosis.rule import Confidence, Finding, Link, Severity
from dtypedoctor.diagnosis.wording import OWN_WORKLOADS, place, short
from dtypedoctor.dtypes import HALF
from dtypedoctor.rules import Statement, make_finding
from dtypedoctor.rules.mismatch.case import Case, Operand, Verdict, described, op_name, ran_in, who_is_what
from dtypedoctor.rules.mismatch.census import Census
from dtypedoctor.rules.mismatch.dtype_origin import (
    ACCUMULATIONS,
    CASTS,
    CONVOLUTIONS,
    PRODUCTS,
    DtypeOrigin,
    Reason,
)
from dtypedoctor.trace.events import Flow
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import AutocastRegion, CustomFunction, OpenRegions

CAST_BY_AUTOCAST = PRODUCTS | CONVOLUTIONS | {"scaled_dot_product_attention"}
"""Ops that an autocast region makes agree, where it is one for their device."""


def custom_function(case: Case) -> Verdict | None:
    """A hand-written backward pass that lost its forward's autocast region, or re-entered one that its sums are not cast in."""
    context = _context(case)
    if context is None:
        return None
    forward, used, decorated = context.forward_autocast, context.fwd_used_autocast, context.decorated
    if forward and not case.op.autocast:
        why = (
            f"custom_fwd and custom_bwd of {case.op.function} belong to another device type than its operands, so they saw no "
            "autocast region and restore none."
            if decorated
            else f"{case.op.function} is not decorated with custom_fwd and custom_bwd, so its backward does not know of the region."
        )
        cause = f"The forward ran inside a {forward} autocast region and the backward outside of any. {why} {_MEET}"
        proof = ran_in(case, forward) if case.ran("equal-dtypes") else None
    elif case.op.autocast and decorated and used:
        cause = (
            f"custom_bwd re-enters the {case.op.autocast} autocast region of the forward, so the products of the backward come "
            f"in {case.op.autocast}; {op_name(case)} writes to memory that exists already, where autocast casts nothing, and that "
            f"memory has the dtype of {_saved(case)}."
        )
        proof = ran_in(case, case.op.autocast) if case.ran("equal-dtypes") else None
    else:
        return None
    return Verdict(
        id="custom-function-autocast",
        fqn=place(case.op),
        summary=f"The backward of {case.op.function} in {short(place(case.op))} mixes {' and '.join(case.dtypes)}.",
        cause=cause,
        proven_by=proof,
        reason=f"{Reason.CUSTOM_FUNCTION}: {case.op.function}",
        unfit=_unfit(case),
        evidence=(_both_regions(case, context),),
    )


def _both_regions(case: Case, context: CustomFunction) -> str:
    forward = f"its forward at {context.forward_source} ran {_under(context.forward_autocast)}"
    return f"{case.op.function}: {forward}, its backward {_under(case.op.autocast)}."


def _under(region: str | None) -> str:
    return f"under {region} autocast" if region else "without autocast"


_MEET = "Gradients in the region's dtype meet the tensors that were saved before they were cast."


def _context(case: Case) -> CustomFunction | None:
    """What the instruments saw of the custom function in whose backward the op ran."""
    if case.op.function is None or case.op.phase not in ("backward", "recompute"):
        return None
    earlier = (seen.what for seen in case.trace.observed(CustomFunction) if seen.n < case.op.n)
    return next((one for one in reversed([*earlier]) if one.function == case.op.function), None)


def _saved(case: Case) -> str:
    return described(case.odd.origin) if case.odd is not None else "what the forward saved"


def autocast_bypass(case: Case) -> Verdict | None:
    """An op that autocast does not cast for: in place, with ``out=``, or not on its list."""
    region = case.op.autocast
    if region is None or region not in case.dtypes or (case.writes_at_index and case.family not in ACCUMULATIONS):
        return None
    return Verdict(
        id="autocast-bypass",
        fqn=place(case.op),
        summary=f"{op_name(case)} in {short(place(case.op))} is not cast by the {region} autocast region around it.",
        cause=(
            f"{who_is_what(case)}: {_why_not_cast(case)} The {region} ones come from {_cast_ones(case, region)}; "
            f"the other comes from {_the_rest(case)}."
        ),
        blamed=_before_casts(case),
        proven_by=ran_in(case, region),
        reason=f"{Reason.INPLACE if writes(case.op) else Reason.AUTOCAST_LIST}: {op_name(case)} is not cast",
        unfit=_unfit(case),
    )


def _unfit(case: Case) -> frozenset[str]:
    """The remedy that adds out of place is for sums that are made in place."""
    return frozenset() if case.op.inplace and case.family == "addmm" else frozenset({"out-of-place-addmm"})


def _why_not_cast(case: Case) -> str:
    op = op_name(case)
    if case.op.inplace:
        return f"autocast leaves in-place ops such as {op} alone, because their result has the dtype of memory that exists already."
    if case.op.out_variant:
        return (
            f"autocast leaves ops with an out= argument such as {op} alone, because that memory has its dtype already."
        )
    return f"{op} is not on the list of ops whose operands autocast casts."


def _cast_ones(case: Case, region: str) -> str:
    """Where the operands in the dtype of the region come from: casts that the code asks for, elsewhere, or ops that autocast casts for."""
    origins = [operand.origin for operand in case.operands if operand.dtype == region]
    cast = [origin.chain[0] for origin in origins if _is_made_under_autocast(origin)]
    by_hand = [f"a cast to {region} at {link.source}" for link in cast if overload_free(link.op) in CASTS]
    others = [described(origin) for origin in origins if not _is_made_under_autocast(origin)]
    return " and ".join([*dict.fromkeys([*by_hand, *others]), *_by_autocast(cast)])


def _is_made_under_autocast(origin: DtypeOrigin) -> bool:
    """Whether an op that autocast casts for made the tensor; its chain then begins with that op."""
    return origin.reason is Reason.AUTOCAST_LIST and len(origin.chain) > 1


def _by_autocast(links: list[Link]) -> list[str]:
    """The ops among ``links`` that are no casts themselves, in one phrase; nothing where there is none."""
    ops = [f"{link.op} at {link.source}" for link in links if overload_free(link.op) not in CASTS]
    return [f"{' and '.join(dict.fromkeys(ops))}, whose operands autocast casts"] if ops else []


def _the_rest(case: Case) -> str:
    before = _before_casts(case)
    if case.odd is None or before is None:
        return "operands in another dtype"
    known = before.origin is not case.odd.origin and before.origin.reason is not Reason.ELSEWHERE
    return described(case.odd.origin) + (f" of {described(before.origin)}" if known else "")


def _before_casts(case: Case) -> Operand | None:
    """The odd operand, followed to the tensor behind the casts that gave it its dtype."""
    odd = case.odd
    return None if odd is None else replace(odd, origin=case.provenance.before_casts(odd.origin))


def wrong_device(case: Case) -> Verdict | None:
    """A product without autocast inside a region that is for another device type than its operands'."""
    seen = _open_regions(case)
    if seen is None or case.op.autocast is not None or case.family not in CAST_BY_AUTOCAST:
        return None
    device = seen.device
    region = next((r for r in reversed(seen.regions) if r.device != device and r.wanted in case.dtypes), None)
    if region is None or any(r.device == device for r in seen.regions):
        return None
    proof = ran_in(case, region.wanted)
    return Verdict(
        id="autocast-wrong-device",
        fqn=place(case.op),
        summary=f"The autocast region around {short(place(case.op))} is for {region.device!r}; its operands are on {device!r}.",
        cause=(
            f"A region casts for its own device type only. The one that {region.source or 'the caller'} enters does nothing for "
            f"tensors on {device!r}, so {op_name(case)} gets {' and '.join(case.dtypes)}, which it would have cast to {region.wanted}."
        ),
        proven_by=proof,
        evidence=(f"With all operands in {region.wanted}, as the region would have cast them, the same op runs.",)
        if proof
        else (),
    )


def _open_regions(case: Case) -> OpenRegions | None:
    """The regions that were open when the op raised."""
    return next((seen.what for seen in case.trace.observed(OpenRegions) if seen.what.of == case.op.n), None)


def contradicted_by(case: Case) -> Finding | None:
    """The contradiction behind a rejection inside a region: weights in one half-precision dtype, the region in the other."""
    model, region = case.model_dtype, case.op.autocast
    if model not in HALF or region not in HALF or model == region:
        return None
    seen = _open_regions(case)
    inner = [r for r in seen.regions if r.dtype == region] if seen is not None else []
    return _contradiction(
        root=case.op.root,
        dtypes=(str(model), str(region)),
        where=(case.op.phase, case.op.step, inner[0].source if inner else None),
        proof=ran_in(case, str(model)),
        consequence=f"{op_name(case)} at {case.op.source} gets {' and '.join(case.dtypes)}, and raises.",
        weights=case.census.weights_in_words(case.op.root),
    )


def contradicting_region(trace: Trace) -> Iterator[Finding]:
    """The same contradiction where nothing has raised (yet)."""
    census = Census(trace)
    told: set[int] = set()
    for flow in trace.all(Flow):
        model = census.dtype_of(flow.root) if flow.autocast in HALF and flow.root not in told else None
        if model in HALF and model != flow.autocast and model in flow.weights:
            told.add(flow.root)
            regions = (seen.what for seen in trace.observed(AutocastRegion))
            source = next((region.source for region in regions if region.dtype == flow.autocast), None)
            yield _contradiction(
                root=flow.root,
                dtypes=(str(model), str(flow.autocast)),
                where=("static", None, source),
                proof=None,
                consequence=None,
                weights=census.weights_in_words(flow.root),
            )


def _contradiction(*, root: int, dtypes: tuple[str, str], where: tuple[str, int | None, str | None], proof: str | None,
                   consequence: str | None, weights: str) -> Finding:  # fmt: skip
    model, region = dtypes
    phase, step, source = where
    entered = f", entered at {source}{_by_whom(source)}" if source else ""
    statement = Statement(
        id="autocast-contradicts-model",
        severity=Severity.ERROR if consequence else Severity.WARNING,
        proven_by=proof,
        summary=f"A {region} autocast region is around a {model} model.",
        cause=_why_it_matters(model, region, met=consequence is not None),
        evidence=(
            f"The weights of {_model(root)}, in elements: {weights}. The region is {region}{entered}.",
            *((consequence,) if consequence else ()),
            *((f"Replayed alone, with all operands in {model}, the same op runs.",) if proof else ()),
        ),
    )
    return make_finding(statement, phase=phase, step=step, dtype=region, source=source)


def _why_it_matters(model: str, region: str, *, met: bool) -> str:
    casts = f"The model is in {model}, and autocast casts the operands of most products to {region}"
    if met:
        cause = f"{casts}; operations that it leaves alone still get {model} tensors, and the two meet."
    else:
        danger = "whose largest value is 65,504" if region == "float16" else "which drops 3 bits of each number"
        cause = f"{casts}, {danger}."
    return f"{cause} {_UNSET}" if region == "float16" else cause


_UNSET = (
    "Where to look in your code (not tested here): where a library opens the region, its dtype often comes from a setting that "
    "is missing, such as ACCELERATE_MIXED_PRECISION, read with the default fp16."
)


def _by_whom(source: str) -> str:
    """A region that the doctor's own workload enters is one that the scenario asks for."""
    return ", where the workload opens what the scenario asks for" if source.startswith(OWN_WORKLOADS) else ""


def _model(root: int) -> str:
    """The first model needs no number: most runs have no other."""
    return f"model {root + 1}" if root > 0 else "the model"


def region_without_effect(trace: Trace) -> Iterator[Finding]:
    """Regions for a device type on which nothing was computed, in a run that has no other."""
    regions = [region for region in trace.observed(AutocastRegion) if not region.what.off]
    devices = {site.device for site in trace.sites.values() if site.kind == "output"}
    useless = next((o for o in regions if o.what.wanted and o.what.device not in devices), None)
    if useless is None or not devices or any(o.what.device in devices for o in regions):
        return
    device = useless.what.device
    statement = Statement(
        id="autocast-wrong-device",
        severity=Severity.INFO,
        confidence=Confidence.LIKELY,
        summary=f"An autocast region for {device!r} is around computations on {', '.join(sorted(devices))} only: it casts nothing.",
        cause="A region casts for its own device type only; everything runs in the dtypes of weights and inputs.",
        evidence=(f"Every module returned tensors on {', '.join(sorted(devices))}.",),
    )
    yield make_finding(statement, phase=useless.phase, step=useless.step, source=useless.what.source)
