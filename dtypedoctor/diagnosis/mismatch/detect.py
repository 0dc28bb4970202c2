"""The family's detector: the first rule that explains a refusal has the word."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from dtypedoctor.diagnosis.finding import Confidence, Finding
from dtypedoctor.diagnosis.mismatch.case import Case, case_of
from dtypedoctor.diagnosis.mismatch.contexts import context_without_region
from dtypedoctor.diagnosis.mismatch.destinations import attention_operands, cache_of_another_dtype, merged_features
from dtypedoctor.diagnosis.mismatch.messages import Complaint, complaint_of
from dtypedoctor.diagnosis.mismatch.operands import by_origin
from dtypedoctor.diagnosis.mismatch.quantised import (
    dequantised_to_another_dtype,
    packed_weight_used_as_dense,
    silently_wrong_weights,
    stale_buffer,
)  # fmt: skip
from dtypedoctor.diagnosis.mismatch.recompute import recomputed_outside_of_the_region, recomputed_with_other_dtypes
from dtypedoctor.diagnosis.mismatch.regions import (
    autocast_bypass,
    contradicted_by,
    contradicting_region,
    custom_function,
    region_without_effect,
    wrong_device,
)  # fmt: skip
from dtypedoctor.diagnosis.mismatch.report import Verdict, finding
from dtypedoctor.diagnosis.mismatch.shards import mixed_shard_units
from dtypedoctor.diagnosis.statement import Statement, located
from dtypedoctor.diagnosis.wording import failing_line, how_the_run_ended, short
from dtypedoctor.trace.events import Raised
from dtypedoctor.trace.reader import Trace

__all__ = ["detect_mismatch"]

RULES: tuple[Callable[[Case], Verdict | None], ...] = (
    packed_weight_used_as_dense,
    recomputed_outside_of_the_region,
    stale_buffer,
    dequantised_to_another_dtype,
    cache_of_another_dtype,
    custom_function,
    autocast_bypass,
    merged_features,
    wrong_device,
    attention_operands,
    by_origin,
)
"""In this order: what is wrong with the operand itself, then what the region did or did not do, then where it came from."""

OF_A_REGION = frozenset({"autocast-bypass", "custom-function-autocast"})
"""Findings that an autocast region in the model's own dtype would not have led to."""

SPOKEN_FOR = frozenset({"recompute", "shards"})
"""Families of complaints with detectors of their own."""


def detect_mismatch(trace: Trace) -> Iterator[Finding]:
    """Everything about dtypes that do not go together, the root before its consequences."""
    explained = tuple(_refusal(trace))
    yield from explained
    yield from context_without_region(trace)
    yield from recomputed_with_other_dtypes(trace)
    yield from mixed_shard_units(trace)
    if not any(f.id in ("stale-dequant-buffer", "quant-state-dtype") for f in explained):
        yield from silently_wrong_weights(trace)
    if not any(f.id == "autocast-contradicts-model" for f in explained):
        yield from contradicting_region(trace)
    if not any(f.id == "autocast-wrong-device" for f in explained):
        yield from region_without_effect(trace)


def _refusal(trace: Trace) -> Iterator[Finding]:
    raised = trace.last(Raised)
    complaint = complaint_of(raised.message) if raised is not None else None
    if raised is None or (complaint is not None and complaint.family in SPOKEN_FOR):
        return
    case = case_of(trace)
    verdict = _verdict(case) if case is not None else None
    if case is not None and verdict is not None:
        root = contradicted_by(case) if verdict.id in OF_A_REGION else None
        found = finding(case, verdict)
        yield from (found,) if root is None else (root, replace(found, consequence_of=root.id))
    elif complaint is not None and case is None:
        yield _by_message(trace, raised, complaint)


def _verdict(case: Case) -> Verdict | None:
    about_dtypes = case.complaint is not None or len(case.dtypes) > 1
    rules = (
        RULES if about_dtypes else (packed_weight_used_as_dense,)
    )  # packed bytes may have a wrong shape first of all
    return next((verdict for rule in rules if (verdict := rule(case)) is not None), None)


def _by_message(trace: Trace, raised: Raised, complaint: Complaint) -> Finding:
    """What the exception alone says, where no op trace was open."""
    module = raised.modules[-1] if raised.modules else None
    dtypes = " and ".join(complaint.dtypes) or "different dtypes"
    statement = Statement(
        id="operand-dtype-mismatch",
        confidence=Confidence.POSSIBLE,
        summary=f"{raised.op or 'An operation'} in {short(module)} got {dtypes}.",
        cause="The message says so; no op trace shows the operands, so where the odd one comes from is not known.",
        evidence=how_the_run_ended(trace),
    )
    dtype = complaint.dtypes[0] if complaint.dtypes else None
    return located(
        statement,
        phase=raised.phase,
        step=raised.step,
        fqn=module,
        op=raised.op,
        dtype=dtype,
        source=failing_line(raised),
    )
