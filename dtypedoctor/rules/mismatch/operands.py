"""Rejected operators that are explained by their operands: by where the odd one got its dtype, by the memory that it is written to.

A norm, a buffer, the input, an adapter, the head; then KV caches, features merged into embeddings, and attention, which reads such caches.
Last what torch names in its message itself: recomputed activations, FSDP units, a custom backward without its region.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from dtypedoctor.diagnosis.ops import OpGraph, graph_of
from dtypedoctor.diagnosis.rule import Finding, Link
from dtypedoctor.diagnosis.wording import (
    at_line,
    complaint_of,
    dtype_named,
    how_the_run_ended,
    is_dtype_error,
    listed,
    module_of,
    place,
    raising_line,
    rejection_in,
    short,
    short_parameter,
)
from dtypedoctor.dtypes import DTYPES, WHOLE
from dtypedoctor.rules import Statement, make_finding
from dtypedoctor.rules.mismatch.case import Case, Operand, Verdict, described, op_name, ran_in, set_in_words, settled_by
from dtypedoctor.rules.mismatch.dtype_origin import ATTENTION, MERGES, WRITES_AT_INDEX, DtypeOrigin, Reason
from dtypedoctor.trace.events import Observed, Op, Raised
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import ShardCall, ShardUnit

OF_THE_OWNER = frozenset({
    Reason.EMBEDDING, Reason.LOAD_DTYPE, Reason.KEEP_IN_FP32, Reason.NORM, Reason.ATTRIBUTE, Reason.BUFFER, Reason.FSDP_OUTPUT,
})  # fmt: skip
"""Reasons that blame the module which holds the tensor, and not the one that met it."""


def without_implementation(case: Case) -> Verdict | None:
    """An op rejects a dtype, in which all its operands are or may be, and takes the same numbers in float32 or as real ones."""
    if "without overflow" in (case.op.error or ""):
        return None  # the dtype has the operator, and not the number that is to be written
    dtype, cause, operand = "", _NO_HALF, next(iter(case.operands), None)
    narrow = [dtype for dtype in case.dtypes if dtype in DTYPES and DTYPES[dtype].bits < FLOAT32_BITS]
    if not case.dtypes and is_dtype_error(case.raised):
        dtype, cause = next((t.dtype for t in case.op.inputs if t.dtype in WHOLE), ""), _NO_WHOLE
    elif len(narrow) == 1 and (len(case.dtypes) == 1 or case.raised_as(f"all-as-{narrow[0]}")):
        dtype = narrow[0]
    way, proven = "in float32", ran_in(case, "float32") if dtype else None
    if proven is None and case.ran("as-real"):
        dtype = next(tensor.dtype for tensor in case.op.inputs if tensor.dtype.startswith("complex"))
        way, cause, operand = "on real numbers", NO_COMPLEX, None
        proven = f"{op_name(case)} run again on the real and imaginary parts does not raise"
    if proven is None and case.complaint is None and case.ran("whole-as-int64"):
        dtype = next(tensor.dtype for tensor in case.op.inputs if tensor.dtype in WHOLE - {"int64", "bool"})
        way, cause, operand = "with int64", NO_SHORT, None
        proven = f"{op_name(case)} run again with int64 in the place of {dtype} does not raise"
    if proven is None:
        return None
    return Verdict(
        id="unsupported-dtype",
        fqn=place(case.op),
        summary=f"{op_name(case)} in {short(place(case.op))} is not implemented for {dtype}: it raises, and runs {way}.",
        cause=cause,
        proven_by=proven,
        blamed=operand,
    )


FLOAT32_BITS = DTYPES["float32"].bits
_NO_HALF = (
    "Decompositions, distances, transforms, some losses and numpy exist in float32 and float64 only, on one device or on all. Their operands are in "
    "half precision because the model is, or because autocast has made them so."
)
_NO_WHOLE = "Means, deviations, decompositions and most losses are defined for floating-point numbers only, and their operands are whole numbers."
NO_SHORT = "Indices are int64, in some operators also int32: other whole numbers are taken for masks or data."
NO_COMPLEX = "Complex numbers have fewer operators than real ones. What treats the real and the imaginary part alike can be computed on `torch.view_as_real(x)`."


def by_origin(case: Case) -> Verdict | None:
    """The finding that the odd operand's origin asks for."""
    odd = case.odd
    if odd is None or len(case.dtypes) < 2:
        return None
    reason = odd.origin.reason
    # A norm or a buffer is to blame where arithmetic with it made the result wider, the input and an adapter wherever they get to
    to_blame = odd.origin.promoted is not None or reason in (Reason.MODEL_INPUT, Reason.ADAPTER)
    explain = OF_A_REASON.get(reason) if to_blame else None
    if explain is None and _is_about_the_head(case, odd):
        explain = _head
    elif explain is None:
        explain = _adapter if reason is Reason.MODULES_TO_SAVE else _fallback
    return replace(explain(case, odd), proven_by=settled_by(case, odd), blamed=odd)


def _is_about_the_head(case: Case, odd: Operand) -> bool:
    """Whether the last layer's own weight is odd, or what it is given was computed in another dtype by a 4-bit layer."""
    own = odd.tensor.origin == "parameter" and module_of(odd.tensor.name or "") == case.op.fqn
    given = odd.origin.reason is Reason.COMPUTE_DTYPE
    return (own or given) and case.census.is_head(case.op.root, case.op.fqn)


def _norm(case: Case, odd: Operand) -> Verdict:
    origin = odd.origin
    entry = case.census.keeper(origin.root, origin.fqn or "")
    kept = f" The model's list of modules to keep in float32 has {entry!r}, which names it." if entry else ""
    return Verdict(
        id="norm-promotes-to-float32",
        fqn=origin.fqn,
        summary=f"{short(origin.fqn)} outputs {odd.dtype} for {case.rule} activations; {_rejecting(case)} then raises.",
        cause=(
            f"The norm's weight is {odd.dtype}{set_in_words(origin)}. It is multiplied with activations that were cast back to {case.rule}, and the "
            f"product of the two is {odd.dtype}: the norm's output follows its weight.{kept}"
        ),
    )


def _buffer(case: Case, odd: Operand) -> Verdict:
    origin = odd.origin
    is_buffer = origin.reason is Reason.BUFFER
    what = "buffer" if is_buffer else "tensor (a plain attribute, which `module.to(dtype)` does not touch)"
    return Verdict(
        id="buffer-promotes-to-float32",
        fqn=origin.fqn,
        summary=f"{'Buffer' if is_buffer else 'Tensor'} {origin.name} ({odd.dtype}) promotes the activations to {odd.dtype}; {_rejecting(case)} then raises.",
        cause=(
            f"{origin.name} is a {odd.dtype} {what}{set_in_words(origin)}. Arithmetic of two floating dtypes returns the wider one, so everything "
            f"after it is {odd.dtype}. Casting parameters only, and mixed-precision policies of shard units, leave buffers alone."
        ),
    )


def _input(case: Case, odd: Operand) -> Verdict:
    # A loss, a metric or a layer of its own is called like a model: it has its name, and so has what meets the input there
    called = case.census.class_of(case.op.root, "") or "The model"
    met = [operand.tensor for operand in case.operands if operand.dtype == case.rule and operand.tensor.name]
    names = [f"{'its ' * (t.origin in _OWN)}{_OWN.get(t.origin or '', '')}{short_parameter(t.name or '')}" for t in met]
    ruling = "its weights are"
    if case.rule != case.model_dtype:
        ruling = f"{listed(names)} {'are' if len(names) > 1 else 'is'}" if names else "the other operand is"
    return Verdict(
        id="model-input-dtype",
        fqn=place(case.op),
        summary=f"{called} gets {odd.dtype} input where {ruling} {case.rule}; {_rejecting(case)} raises.",
        cause=(
            f"The {odd.dtype} input {odd.origin.name}{set_in_words(odd.origin)} reaches {op_name(case)} in that dtype. "
            f"Nothing between the caller and {short(place(case.op))} casts it."
        ),
    )


_OWN = {"parameter": "", "buffer": "buffer ", "attribute": "attribute "}


def _adapter(case: Case, odd: Operand) -> Verdict:
    origin = odd.origin
    region = "autocast does not cast this operator" if case.op.autocast else "no autocast region is open"
    return Verdict(
        id="adapter-dtype-mismatch",
        fqn=case.census.saved_copy(origin.root, origin.fqn or "") or origin.fqn,
        summary=f"The adapter {short(origin.fqn)} is {odd.dtype}, the base model and its activations are {case.rule}.",
        cause=(
            f"{origin.name} is a trainable {odd.dtype} weight{set_in_words(origin)} beside a frozen {case.rule} one. Nothing casts one to the "
            f"other: {region}, and the adapter's input has the dtype of the base model."
        ),
    )


def _head(case: Case, odd: Operand) -> Verdict:
    origin, fqn, head = odd.origin, place(case.op), short(place(case.op))
    if origin.reason is Reason.COMPUTE_DTYPE:
        cause = (
            f"The 4-bit layer {short(origin.fqn)} computes in {odd.dtype} (its compute dtype, float32 by default) and outputs that; "
            f"{head} is {case.rule} and casts nothing."
        )
    else:
        fqn = case.census.saved_copy(origin.root, origin.fqn or "") or origin.fqn
        cause = f"The head computes with {described(origin)}; the backbone outputs {case.rule} and nothing casts it."
    weight = next((operand for operand in case.operands if operand.tensor.origin == "parameter"), None)
    own = weight.dtype if weight is not None else case.rule
    made = set_in_words(weight.origin) if weight is not None else ""
    given = next((dtype for dtype in case.dtypes if dtype != own), None)
    return Verdict(
        id="head-dtype-mismatch",
        fqn=fqn,
        summary=f"The last layer, {head}, has {own} weights{made} but gets a {given} input.",
        cause=cause,
    )


def _fallback(case: Case, odd: Operand) -> Verdict:
    origin, module = odd.origin, place(case.op)
    in_backward = case.op.phase == "backward" and module == ""  # of a custom function: no module computes it
    where = f"the backward pass{at_line(case.op.source)}" if in_backward and case.op.source else short(module)
    ruled_by = "the other operands are"
    if case.rule == case.op.autocast:
        ruled_by = "the autocast region casts to"
    elif case.rule == case.model_dtype:
        ruled_by = "most of the model's weights are"
    more = ""
    if origin.reason is Reason.KEEP_IN_FP32:
        entry = case.census.keeper(origin.root, origin.fqn or "")
        more = f" The entry {entry!r} of the model's keep list names it, and its forward casts nothing."
    elif origin.reason is Reason.FSDP_OUTPUT:
        more = " A unit's output_dtype is applied at the end of every unit, inner ones too."
    return Verdict(
        id="operand-dtype-mismatch",
        fqn=origin.fqn if origin.reason in OF_THE_OWNER else None if in_backward else module,
        summary=f"{op_name(case)} in {where} gets {' and '.join(case.dtypes)}{' and raises' if case.op.error else ''}.",
        cause=f"{case.rule} is what {ruled_by}. The {odd.dtype} operand goes back to {described(origin)}.{more}",
    )


def _rejecting(case: Case) -> str:
    return f"{op_name(case)} in {short(place(case.op))}"


OF_A_REASON = {
    Reason.NORM: _norm,
    Reason.BUFFER: _buffer,
    Reason.ATTRIBUTE: _buffer,
    Reason.MODEL_INPUT: _input,
    Reason.ADAPTER: _adapter,
}
"""The finding by the reason for the odd dtype."""

OUTLIVES_THE_CALL = frozenset({Reason.ATTRIBUTE, Reason.BUFFER, Reason.ELSEWHERE})
FLASH = "flash-attention"
KEY_AND_VALUE = (1, 2)
"""Operands of an attention kernel that a memory can be."""


def cache_of_another_dtype(case: Case) -> Verdict | None:
    """A write of a module into memory that was there before the call, at positions and not under a mask; what is added up is no cache."""
    target, source = _target_and_source(case)
    is_masked = any(t.dtype == "bool" for t in case.op.inputs)
    adds_up = "add" in case.family or "reduce" in case.family
    if target is None or source is None or is_masked or adds_up or case.op.root < 0:
        return None
    if not _outlives_the_call(target.origin):
        return None
    return _cache(case, target, f"{op_name(case)} writes {source.dtype} keys or values into it.")


def merged_features(case: Case) -> Verdict | None:
    """A write into a tensor that the call itself computed: features put into embeddings, experts' answers into rows."""
    target, source = _target_and_source(case)
    if case.family not in MERGES or target is None or source is None or target.origin.reason is Reason.FACTORY:
        return None
    return Verdict(
        id="merge-dtype-mismatch",
        fqn=place(case.op),
        summary=f"{short(place(case.op))} writes {source.dtype} features into a {target.dtype} tensor.",
        cause=(
            f"{op_name(case)} needs one dtype and casts nothing, under autocast neither. The destination goes back to "
            f"{described(target.origin)}, the source to {described(source.origin)}."
        ),
        proven_by=settled_by(case, source),
        blamed=source,
    )


def attention_operands(case: Case) -> Verdict | None:
    """Queries, keys, values or a mask of different dtypes, or of one that the kernel does not take."""
    family = case.complaint.family if case.complaint is not None else ""
    odd = case.odd if case.odd is not None else next(iter(case.operands), None)
    if odd is None or (case.family not in ATTENTION and family not in ("attention", FLASH)):
        return None
    # What was there before the call, as it was, is a memory as keys or values; in the place of the mask it is a mask or a table of biases
    is_key_or_value = odd.origin.promoted is None and odd.index in KEY_AND_VALUE
    if is_key_or_value and _outlives_the_call(odd.origin) and len(case.dtypes) > 1:
        return _cache(case, odd, f"{op_name(case)} reads it beside {case.rule} queries.")
    dtypes = ", ".join(operand.dtype for operand in case.operands)
    of_kernel = ", and the flash kernel takes float16 and bfloat16 only" if family == FLASH else ""
    return Verdict(
        id="attention-dtype-mismatch",
        fqn=place(case.op),
        summary=f"Attention in {short(place(case.op))} gets {' and '.join(case.dtypes)}.",
        cause=(
            f"Query, key, value and mask (here {dtypes}) have to agree{of_kernel}. The {odd.dtype} goes back to {described(odd.origin)}."
        ),
        proven_by=settled_by(case, odd),
        blamed=odd,
    )


def _cache(case: Case, cache: Operand, use: str) -> Verdict:
    config = case.census.config_dtype(case.op.root)
    others = next((dtype for dtype in case.dtypes if dtype != cache.dtype), "another dtype")
    configured = ", the dtype of the configuration," if config == cache.dtype else ""
    evidence = [f"No op of this call made the {cache.dtype} tensor: it was there before."]
    if config is not None:
        evidence.append(f"The model's configuration says {config}.")
    # The operand with the reason by which it counts here
    last = cache.origin.chain[-1]
    what = f"{Reason.CACHE}: {cache.origin.name}" if cache.origin.name else str(Reason.CACHE)
    chain = (*cache.origin.chain[:-1], replace(last, op=what, dtype_in=None))
    return Verdict(
        id="kv-cache-dtype",
        fqn=place(case.op),
        summary=f"The KV cache of {short(place(case.op))} is {cache.dtype}, but what it is used with is {others}.",
        cause=f"The cache was allocated in {cache.dtype}{configured} before the call, and the layers compute in {others}. {use}",
        proven_by=f"{op_name(case)} run again with all operands in one dtype does not raise"
        if case.ran("equal-dtypes")
        else None,
        evidence=tuple(evidence),
        blamed=replace(cache, origin=replace(cache.origin, reason=Reason.CACHE, promoted=None, chain=chain)),
    )


def _target_and_source(case: Case) -> tuple[Operand | None, Operand | None]:
    """What an op writes into at positions, and what it writes there."""
    operands = case.operands if case.family in WRITES_AT_INDEX else ()
    if len(operands) < 2 or operands[0].index != 0:
        return None, None
    return operands[0], operands[-1]


def _outlives_the_call(origin: DtypeOrigin) -> bool:
    """Whether memory was there before the call; an object that the model was given (not a plain argument) was."""
    handed_over = origin.reason is Reason.MODEL_INPUT and (origin.name or "").count(".") > 1
    return origin.reason in OUTLIVES_THE_CALL or handed_over


_METADATA = re.compile(
    r"saved metadata: .*?'dtype': torch\.(\w+).*?recomputed metadata: .*?'dtype': torch\.(\w+)", re.DOTALL
)


def recomputed_outside_of_the_region(case: Case) -> Verdict | None:
    """An op rejects in a recomputation what it took in the forward pass, where an autocast region was open."""
    op = case.op
    if op.phase != "recompute" or op.autocast is not None:
        return None
    twins = (
        one for one in case.graph.ops if (one.root, one.fqn, one.op, one.phase) == (op.root, op.fqn, op.op, "forward")
    )
    first = next((twin for twin in twins if twin.autocast is not None), None)
    if first is None:
        return None
    unit = case.raised.modules[0] if case.raised.modules else op.fqn
    return Verdict(
        id="recompute-dtype-mismatch",
        fqn=unit,
        summary=f"{short(unit)} is recomputed without the {first.autocast} autocast region of its forward pass.",
        cause=(
            f"The forward pass ran inside a {first.autocast} autocast region. The recomputation in the backward pass enters "
            f"none, so {op_name(case)} gets {' and '.join(case.dtypes)} as they are."
        ),
        proven_by=ran_in(case, first.autocast),
        evidence=(f"In the forward pass {first.op} got {', '.join(t.dtype for t in first.inputs)}, cast by autocast.",),
    )


def recomputed_with_other_dtypes(trace: Trace) -> Iterator[Finding]:
    """torch's own check has found that a recomputation saved tensors of other dtypes than the forward pass."""
    raised = rejection_in(trace)
    complaint = complaint_of(raised.message) if raised is not None else None
    if raised is None or complaint is None or complaint.family != "recompute":
        return
    changed = next((pair for pair in _METADATA.findall(raised.message) if pair[0] != pair[1]), None)
    if changed is None:
        return
    saved, again = (dtype_named(word) for word in changed)
    unit = raised.modules[0] if raised.modules else None
    pair = _first_difference(graph_of(trace), unit)
    before, after = pair or (None, None)
    evidence = [f"The forward pass saved {saved} where the recomputation has {again}."]
    proven = None
    if before is not None and after is not None:
        dtypes = [op.outputs[0].dtype for op in (before, after)]
        evidence.append(
            f"The first op that differs is {after.op}{at_line(after.source)}: {dtypes[0]} in the forward pass, {dtypes[1]} in the recomputation."
        )
        proven = f"{after.op} ran twice, in the forward pass and in the recomputation, and returned two dtypes"
    statement = Statement(
        id="recompute-dtype-mismatch",
        proven_by=proven,
        summary=f"{short(unit)} is recomputed in {again} where its forward pass was in {saved}.",
        cause=(
            "Checkpointing runs the module a second time in the backward pass and expects the same tensors. Something that "
            "decides dtypes (the default dtype, an autocast region, a cast of the inputs) was different by then."
        ),
        evidence=(*evidence, *how_the_run_ended(trace)),
    )
    yield make_finding(
        statement,
        phase="recompute",
        step=raised.step,
        fqn=unit,
        op=after.op if after is not None else None,
        dtype=again,
        source=after.source if after is not None else None,
        provenance=tuple(map(_link, pair or ())),
    )


def _first_difference(graph: OpGraph, unit: str | None) -> tuple[Op, Op] | None:
    """The first op of the recomputation whose results have other dtypes than those of the same op in the forward pass."""
    if unit is None:
        return None
    for before, after in zip(_ops_of(graph, unit, "forward"), _ops_of(graph, unit, "recompute"), strict=False):
        if before.op != after.op:
            return None
        if [t.dtype for t in before.outputs] != [t.dtype for t in after.outputs]:
            return before, after
    return None


def _ops_of(graph: OpGraph, unit: str, phase: str) -> list[Op]:
    """The ops of a module, and of those inside it, in one phase."""
    return [op for op in graph.ops if op.phase == phase and f"{op.fqn}.".startswith(f"{unit}.")]


def _link(op: Op) -> Link:
    return Link(
        fqn=op.fqn,
        op=op.op,
        dtype_in=op.inputs[0].dtype if op.inputs else None,
        dtype_out=op.outputs[0].dtype if op.outputs else None,
        source=op.source,
    )


FSDP2 = "fully_shard"


def mixed_shard_units(trace: Trace) -> Iterator[Finding]:
    """FSDP has rejected a unit because its parameters (or gradients) do not have one dtype, or is going to.

    ``fully_shard`` takes any parameters, and rejects them when the unit is first called: what it was given is enough to tell.
    """
    raised = rejection_in(trace)
    complaint = complaint_of(raised.message) if raised is not None else None
    if complaint is not None and complaint.family == "shards":
        # Known by its name where it has been called, else from the call that made it
        units: Sequence[Observed[ShardUnit | ShardCall]] = (*trace.observed(ShardUnit), *trace.observed(ShardCall))
        yield _of_a_unit(trace, _mixed(units), raised)
    elif not trace.observed(ShardUnit):  # no unit has been called yet
        call = _mixed([seen for seen in trace.observed(ShardCall) if seen.what.api == FSDP2])
        if call is not None:
            yield _of_a_unit(trace, call, None)


def _mixed(units: Sequence[Observed[ShardUnit | ShardCall]]) -> Observed[ShardUnit | ShardCall] | None:
    return next((unit for unit in units if len(_dtypes(unit.what)) > 1), None)


def _dtypes(unit: ShardUnit | ShardCall) -> Mapping[str, list[str]]:
    """Names of parameters by dtype, of those that have to agree: FSDP2 asks it of trainable ones only."""
    is_first = isinstance(unit, ShardCall) and unit.api != FSDP2
    return unit.dtypes if is_first or unit.trainable is None else unit.trainable


def _of_a_unit(trace: Trace, unit: Observed[ShardUnit | ShardCall] | None, raised: Raised | None) -> Finding:
    dtypes = _dtypes(unit.what) if unit is not None else {}
    fqn = unit.fqn if unit is not None else None
    if fqn is None and raised is not None and raised.modules:
        fqn = raised.modules[-1]
    cls = unit.what.cls if unit is not None and isinstance(unit.what, ShardCall) else "of FSDP"
    yet = ("The unit has not been called: FSDP2 raises at the first forward pass.",) if raised is None else ()
    statement = Statement(
        id="fsdp-mixed-dtypes",
        summary=f"The shard unit {short(fqn) if fqn is not None else cls} holds parameters of {' and '.join(dtypes) or 'more than one dtype'}.",
        cause=(
            "FSDP puts the parameters of a unit into one flat buffer, which has one dtype. Adapters, norms kept in float32 and "
            "4-bit storage (whose storage dtype counts) are the usual exceptions inside a unit of half-precision weights."
        ),
        evidence=(
            *(f"{dtype}: {listed(sorted(names))}." for dtype, names in dtypes.items()),
            *how_the_run_ended(trace),
            *yet,
        ),
    )
    calls = (seen.what for seen in trace.observed(ShardCall))
    sources = (call.source for call in calls if _dtypes(call) and _same(call, dtypes))
    return make_finding(
        statement,
        phase=raised.phase if raised is not None else "static",
        step=raised.step if raised is not None else None,
        fqn=fqn,
        dtype=min(dtypes, key=lambda dtype: len(dtypes[dtype])) if dtypes else None,
        source=next(sources, None),
    )


def _same(call: ShardCall, dtypes: Mapping[str, list[str]]) -> bool:
    """Whether a call made the unit with these parameters; its names are relative to that unit."""
    made = _dtypes(call)
    return made.keys() == dtypes.keys() and all(
        any(name == own or name.endswith(f".{own}") for name in dtypes[dtype]) for dtype in made for own in made[dtype]
    )


MISSING = re.compile(r"'(?P<function>\w+?)(?:Backward)?' object has no attribute '_(?:fwd_used_autocast|dtype)'")
"""What ``custom_bwd`` says of a context that ``custom_fwd`` has not written to."""


def context_without_region(trace: Trace) -> Iterator[Finding]:
    """``custom_bwd`` without a ``custom_fwd`` that could have left it anything: none at all, or one without ``ctx``."""
    raised = rejection_in(trace)
    found = MISSING.search(raised.message) if raised is not None and raised.type == "AttributeError" else None
    if raised is None or found is None:
        return
    function = found["function"]
    statement = Statement(
        id="custom-function-autocast",
        summary=f"The backward of {function} asks for the autocast region of its forward, which was not noted.",
        cause=(
            "custom_fwd leaves the region's dtype in the ctx that forward gets as its first argument, and custom_bwd reads it "
            f"there. The forward of {function} is not decorated, or has no ctx because the function defines setup_context."
        ),
        evidence=how_the_run_ended(trace),
    )
    finding = make_finding(statement, phase=raised.phase, step=raised.step, source=raising_line(raised))
    yield replace(finding, references=("https://github.com/pytorch/pytorch/issues/132388", *finding.references))
