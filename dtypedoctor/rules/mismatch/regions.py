"""Autocast regions: ops they do not reach, functions that lose or re-enter them, regions for another device or model."""

from collections.abc import Iterator
from dataclasses import replace

from dtypedoctor.diagnosis.ops import overload_free, writes
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.diagnosis.wording import OWN_WORKLOADS, at_line, place, short
from dtypedoctor.dtypes import HALF
from dtypedoctor.rules import Statement, make_finding
from dtypedoctor.rules.mismatch.case import Case, Verdict, described, op_name, ran_in, who_is_what
from dtypedoctor.rules.mismatch.dtype_origin import (
    CASTS,
    CONVOLUTIONS,
    MERGES,
    PRODUCTS,
    Census,
    Reason,
)
from dtypedoctor.trace.events import Flow
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import AutocastRegion, CustomFunction, OpenRegions

CAST_BY_AUTOCAST = PRODUCTS | CONVOLUTIONS | {"scaled_dot_product_attention"}
"""Ops that an autocast region makes agree, where it is one for their device."""


def custom_function(case: Case) -> Verdict | None:
    """A hand-written backward pass that lost its forward's autocast region, or re-entered one that its sums are not cast in."""
    if case.op.function is None or case.op.phase not in ("backward", "recompute"):
        return None
    calls = (seen.what for seen in case.trace.observed(CustomFunction) if seen.n < case.op.n)
    context = next((call for call in reversed([*calls]) if call.function == case.op.function), None)
    if context is None:
        return None
    forward, backward = context.forward_autocast, case.op.autocast
    if forward and not backward:
        why = (
            f"custom_fwd and custom_bwd of {case.op.function} belong to another device type than its operands, so they saw no "
            "autocast region and restore none."
            if context.decorated
            else f"{case.op.function} is not decorated with custom_fwd and custom_bwd, so its backward does not know of the region."
        )
        cause = (
            f"The forward ran inside a {forward} autocast region and the backward outside of any. {why} Gradients in the region's dtype meet "
            "the tensors that were saved before they were cast."
        )
    elif backward and context.decorated and context.fwd_used_autocast:
        saved = described(case.odd.origin) if case.odd is not None else "what the forward saved"
        cause = (
            f"custom_bwd re-enters the {backward} autocast region of the forward, so the products of the backward come "
            f"in {backward}; {op_name(case)} writes to memory that exists already, where autocast casts nothing, and that "
            f"memory has the dtype of {saved}."
        )
    else:
        return None
    ran = [f"under {region} autocast" if region else "without autocast" for region in (forward, backward)]
    return Verdict(
        id="custom-function-autocast",
        fqn=place(case.op),
        summary=f"The backward of {case.op.function} in {short(place(case.op))} mixes {' and '.join(case.dtypes)}.",
        cause=cause,
        proven_by=ran_in(case, backward or forward) if case.ran("equal-dtypes") else None,
        reason=f"{Reason.CUSTOM_FUNCTION}: {case.op.function}",
        unfit=_unfit(case),
        evidence=(f"{case.op.function}: its forward at {context.forward_source} ran {ran[0]}, its backward {ran[1]}.",),
    )


def autocast_bypass(case: Case) -> Verdict | None:
    """An op that autocast does not cast for: in place, with ``out=``, or not on its list."""
    region, op = case.op.autocast, op_name(case)
    if region is None or region not in case.dtypes or case.family in MERGES:
        return None
    if case.op.inplace:
        why = f"autocast leaves in-place ops such as {op} alone, because their result has the dtype of memory that exists already."
    elif case.op.out_variant:
        why = (
            f"autocast leaves ops with an out= argument such as {op} alone, because that memory has its dtype already."
        )
    else:
        why = f"{op} is not on the list of ops whose operands autocast casts."

    # The odd operand, followed to the tensor behind the casts that gave it its dtype
    odd, before, rest = case.odd, None, "operands in another dtype"
    if odd is not None:
        before = replace(odd, origin=case.provenance.before_casts(odd.origin))
        known = before.origin is not odd.origin and before.origin.reason is not Reason.ELSEWHERE
        rest = described(odd.origin) + (f" of {described(before.origin)}" if known else "")
    return Verdict(
        id="autocast-bypass",
        fqn=place(case.op),
        summary=f"{op} in {short(place(case.op))} is not cast by the {region} autocast region around it.",
        cause=f"{who_is_what(case)}: {why} The {region} ones come from {_cast_ones(case, region)}; the other comes from {rest}.",
        blamed=before,
        proven_by=ran_in(case, region),
        reason=f"{Reason.INPLACE if writes(case.op) else Reason.AUTOCAST_LIST}: {op} is not cast",
        unfit=_unfit(case),
    )


def _unfit(case: Case) -> frozenset[str]:
    """The remedy that adds out of place is for sums that are made in place."""
    return frozenset() if case.op.inplace and case.family == "addmm" else frozenset({"out-of-place-addmm"})


def _cast_ones(case: Case, region: str) -> str:
    """Where the operands in the dtype of the region come from: casts that the code asks for, elsewhere, or ops that autocast casts for."""
    by_hand, elsewhere, by_autocast = [], [], []
    for origin in (operand.origin for operand in case.operands if operand.dtype == region):
        if origin.reason is not Reason.AUTOCAST_LIST or len(origin.chain) < 2:
            elsewhere.append(described(origin))
        elif overload_free(origin.chain[0].op) in CASTS:
            by_hand.append(f"a cast to {region} at {origin.chain[0].source}")
        else:
            by_autocast.append(f"{origin.chain[0].op} at {origin.chain[0].source}")
    casting = [f"{' and '.join(dict.fromkeys(by_autocast))}, whose operands autocast casts"] if by_autocast else []
    return " and ".join([*dict.fromkeys([*by_hand, *elsewhere]), *casting])


def wrong_device(case: Case) -> Verdict | None:
    """A product without autocast inside a region that is for another device type than its operands'."""
    seen = _open_regions(case)
    if seen is None or case.op.autocast is not None or case.family not in CAST_BY_AUTOCAST:
        return None
    device = seen.device
    region = next((r for r in reversed(seen.regions) if r.device != device and r.wanted in case.dtypes), None)
    if region is None or any(r.device == device for r in seen.regions):
        return None

    regardless = f"so {op_name(case)} gets {' and '.join(case.dtypes)}, which it would have cast to {region.wanted}"
    return Verdict(
        id="autocast-wrong-device",
        fqn=place(case.op),
        summary=f"The autocast region around {short(place(case.op))} is for {region.device!r}; its operands are on {device!r}.",
        cause=(
            f"A region casts for its own device type only. The one that {region.source or 'the caller'} enters does nothing for "
            f"tensors on {device!r}, {regardless}."
        ),
        proven_by=ran_in(case, region.wanted),
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
        case.census,
        case.op.root,
        region=str(region),
        where=(case.op.phase, case.op.step, inner[0].source if inner else None),
        proof=ran_in(case, str(model)),
        consequence=f"{op_name(case)}{at_line(case.op.source)} gets {' and '.join(case.dtypes)}, and raises.",
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
            yield _contradiction(census, flow.root, region=str(flow.autocast), where=("static", None, source))


def _contradiction(census: Census, root: int, *, region: str, where: tuple[str, int | None, str | None],
                   proof: str | None = None, consequence: str = "") -> Finding:  # fmt: skip
    phase, step, source = where
    model, which = census.dtype_of(root), f"model {root + 1}" if root > 0 else "the model"
    entered = f", entered at {source}" if source else ""
    if source and source.startswith(OWN_WORKLOADS):
        entered += ", where the workload opens what the scenario asks for"
    if consequence:
        danger = f"; operations that it leaves alone still get {model} tensors, and the two meet."
    else:
        danger = f", {'whose largest value is 65,504' if region == 'float16' else 'which drops 3 bits of each number'}."
    statement = Statement(
        id="autocast-contradicts-model",
        severity=Severity.ERROR if consequence else Severity.WARNING,
        proven_by=proof,
        summary=f"A {region} autocast region is around a {model} model.",
        cause=(
            f"The model is in {model}, and autocast casts the operands of most products to {region}{danger}"
            + (f" {_UNSET}" if region == "float16" else "")
        ),
        evidence=(
            f"The weights of {which}, in elements: {census.weights_in_words(root)}. The region is {region}{entered}.",
            *filter(None, [consequence]),
            *((f"Replayed alone, with all operands in {model}, the same op runs.",) if proof else ()),
        ),
    )
    return make_finding(statement, phase=phase, step=step, dtype=region, source=source)


_UNSET = (
    "Where to look in your code (not tested here): where a library opens the region, its dtype often comes from a setting that "
    "is missing, such as ACCELERATE_MIXED_PRECISION, read with the default fp16."
)


def region_without_effect(trace: Trace) -> Iterator[Finding]:
    """Regions for a device type on which nothing was computed, in a run that has no other."""
    devices = {site.device for site in trace.sites.values() if site.kind == "output"}
    regions = [seen for seen in trace.observed(AutocastRegion) if not seen.what.off]
    wanted = [seen for seen in regions if seen.what.wanted]
    if not all((wanted, devices, devices.isdisjoint(seen.what.device for seen in regions))):
        return
    first, on = wanted[0], ", ".join(sorted(devices))
    statement = Statement(
        id="autocast-wrong-device",
        severity=Severity.INFO,
        summary=f"An autocast region for {first.what.device!r} is around computations on {on} only: it casts nothing.",
        cause="A region casts for its own device type only; everything runs in the dtypes of weights and inputs.",
        evidence=(f"Every module returned tensors on {on}.",),
    )
    yield make_finding(statement, phase=first.phase, step=first.step, source=first.what.source)
