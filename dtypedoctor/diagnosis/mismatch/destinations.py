"""Tensors written into others: key/value caches, features merged into embeddings. And attention, which reads such caches."""

from dtypedoctor.diagnosis.mismatch.birth import Birth, Reason
from dtypedoctor.diagnosis.mismatch.case import Case, Operand
from dtypedoctor.diagnosis.mismatch.kinds import ATTENTION, MERGES
from dtypedoctor.diagnosis.mismatch.report import Verdict, described, said, settled_by
from dtypedoctor.diagnosis.wording import place, short

__all__ = ["attention_operands", "cache_of_another_dtype", "merged_features"]

OUTLIVES_THE_CALL = frozenset({Reason.ATTRIBUTE, Reason.BUFFER, Reason.ELSEWHERE})
FLASH = "flash-attention"
KEY_AND_VALUE = (1, 2)
"""Operands of an attention kernel that a memory can be."""


def cache_of_another_dtype(case: Case) -> Verdict | None:
    """A write into memory that was there before the call, at positions and not under a mask."""
    if not case.writes_at_index or any(t.dtype == "bool" for t in case.op.inputs):
        return None
    target, source = _target_and_source(case)
    if target is None or source is None or not _outlives_the_call(target.birth):
        return None
    return _cache(case, target, f"{said(case)} writes {source.dtype} keys or values into it.")


def merged_features(case: Case) -> Verdict | None:
    """A write into a tensor that the call itself computed: features put into embeddings, experts' answers into rows."""
    target, source = _target_and_source(case)
    if case.family not in MERGES or target is None or source is None or target.birth.reason is Reason.FACTORY:
        return None
    return Verdict(
        id="merge-dtype-mismatch",
        fqn=place(case.op),
        summary=f"{short(place(case.op))} writes {source.dtype} features into a {target.dtype} tensor.",
        cause=(
            f"{said(case)} needs one dtype and casts nothing, under autocast neither. The destination goes back to "
            f"{described(target.birth)}, the source to {described(source.birth)}."
        ),
        proven_by=settled_by(case, source),
        blamed=source,
    )


def attention_operands(case: Case) -> Verdict | None:
    """Queries, keys, values or a mask of different dtypes, or of one that the kernel does not take."""
    family = case.complaint.family if case.complaint is not None else ""
    if case.family not in ATTENTION and family not in ("attention", FLASH):
        return None
    odd = case.odd if case.odd is not None else next(iter(case.operands), None)
    if odd is None:
        return None
    if _is_memory(odd) and len(case.dtypes) > 1:
        return _cache(case, odd, f"{said(case)} reads it beside {case.rule} queries.")
    dtypes = ", ".join(operand.dtype for operand in case.operands)
    return Verdict(
        id="attention-dtype-mismatch",
        fqn=place(case.op),
        summary=f"Attention in {short(place(case.op))} gets {' and '.join(case.dtypes)}.",
        cause=(
            f"Query, key, value and mask (here {dtypes}) have to agree"
            + (", and the flash kernel takes float16 and bfloat16 only" if family == FLASH else "")
            + f". The {odd.dtype} goes back to {described(odd.birth)}."
        ),
        proven_by=settled_by(case, odd),
        blamed=odd,
    )


def _cache(case: Case, cache: Operand, use: str) -> Verdict:
    config = case.census.config_dtype(case.op.root)
    others = next((dtype for dtype in case.dtypes if dtype != cache.dtype), "another dtype")
    evidence = [f"No op of this call made the {cache.dtype} tensor: it was there before."]
    if config is not None:
        evidence.append(f"The model's configuration says {config}.")
    return Verdict(
        id="kv-cache-dtype",
        fqn=place(case.op),
        summary=f"The key/value memory of {short(place(case.op))} is {cache.dtype}, what goes with it is {others}.",
        cause=(
            f"The memory was made in {cache.dtype}"
            + (", the dtype of the configuration," if config == cache.dtype else "")
            + f" before the call, and the layers compute in {others}. {use}"
        ),
        proven_by=f"{said(case)} run again with all operands in one dtype does not raise"
        if case.ran("equal-dtypes")
        else None,
        evidence=tuple(evidence),
        blamed=_as_cache(cache),
    )


def _as_cache(operand: Operand) -> Operand:
    """The operand with the reason by which it counts here."""
    birth = operand.birth
    last = birth.chain[-1]
    what = f"{Reason.CACHE}: {birth.name}" if birth.name else str(Reason.CACHE)
    changed = last.__class__(fqn=last.fqn, op=what, dtype_in=None, dtype_out=last.dtype_out, source=last.source)
    return Operand(
        index=operand.index,
        tensor=operand.tensor,
        birth=Birth(
            reason=Reason.CACHE, dtype=birth.dtype, root=birth.root, fqn=birth.fqn, name=birth.name, op=birth.op,
            chain=(*birth.chain[:-1], changed),
        ),
    )  # fmt: skip


def _target_and_source(case: Case) -> tuple[Operand | None, Operand | None]:
    operands = case.operands if case.writes_at_index else ()
    if len(operands) < 2 or operands[0].index != 0:
        return None, None
    return operands[0], operands[-1]


def _is_memory(operand: Operand) -> bool:
    """Whether attention reads what was there before the call, as it was, as keys or values; in the place of the mask it is a mask or a
    table of biases, whatever holds it."""
    birth = operand.birth
    return birth.promoted is None and operand.index in KEY_AND_VALUE and _outlives_the_call(birth)


def _outlives_the_call(birth: Birth) -> bool:
    """Whether memory was there before the call; an object that the model was given (not a plain argument) was."""
    handed_over = birth.reason is Reason.MODEL_INPUT and (birth.name or "").count(".") > 1
    return birth.reason in OUTLIVES_THE_CALL or handed_over
