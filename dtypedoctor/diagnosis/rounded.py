"""``rounds-out-of-domain``: an operator is not defined for what rounding has made of its operands, such as an epsilon that is 0."""

from collections.abc import Iterator

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.nonfinite_origin import FLOAT32_MAX, Origin, Vanished, found_at, vanished
from dtypedoctor.diagnosis.statement import Statement
from dtypedoctor.diagnosis.wording import bad_elements, how_the_run_ended, place, short
from dtypedoctor.dtypes import DTYPES


def judge_rounded(origin: Origin) -> Finding | None:
    """An op that has no finite result for its operands in any dtype, and has one for those of the float32 program."""
    op, again, program = origin.op, origin.replay, origin.program
    if again is None or again.note or program is None or not program.finite or program.absmax is None:
        return None
    if again.finite and (again.absmax is None or again.absmax <= FLOAT32_MAX):
        return None  # a wider dtype is all that this op needs
    found = vanished(origin.graph, op)
    said = Statement(
        id="rounds-out-of-domain",
        proven_by=(
            f"{op.op} on the operands of the same program in float32, since the op trace began, is finite (up to "
            f"{program.absmax:,.6g}); on its own operands it is not, in {again.how} either"
        ),
        summary=f"{_what(found)}, and {op.op} in {short(place(op))} makes {_result(origin)} of it in step {op.step} ({op.phase}).",
        cause=_cause(found),
        evidence=tuple(_evidence(origin, found)),
    )
    return found_at(origin, said)


def _what(found: Vanished | None) -> str:
    if found is None:
        return "Rounding moves an operand to where the operator is not defined"
    dtype = found.tensor.dtype
    if found.number is not None and found.maker is not None:
        return f"The number {found.number} rounds to 0 in {found.maker.outputs[0].dtype}"
    if found.maker is not None:
        return f"The result of {found.maker.op} rounds to 0 in {dtype}"
    if found.tensor.name is not None:
        return f"The {found.tensor.origin} {found.tensor.name} rounds to 0 in {dtype}"
    return f"A number or tensor from before rounds to 0 in {dtype}"


def _result(origin: Origin) -> str:
    return "NaN" if origin.result.num_nan else "inf"


def _cause(found: Vanished | None) -> str:
    if found is None:
        return (
            "In float32 the same program is finite here. Its values differ by rounding only, and one of them has crossed a border: "
            "1 - 1e-4 is 1 in bfloat16, and a small negative number under a root was positive."
        )
    known = DTYPES[found.tensor.dtype] if found.tensor.dtype in DTYPES else DTYPES["float16"]
    return (
        f"The smallest positive {known.name} number is {known.smallest:.3g}; whatever is below half of that becomes 0, and so does "
        "a difference below half of the spacing of numbers. An epsilon that guards a division has to be representable: take one from "
        "torch.finfo(dtype).tiny or eps on, or compute the guarded part in float32."
    )


def _evidence(origin: Origin, found: Vanished | None) -> Iterator[str]:
    op = origin.op
    yield f"{bad_elements(origin.result)} of the {origin.result.dtype} result of {op.op} are inf or NaN; its operands are finite."
    if found is not None:
        at = f" at {found.maker.source}" if found.maker is not None and found.maker.source else ""
        yield f"{found.tensor.lost} elements that {_maker(found)}{at} leaves are 0; in float32 they are not."
    yield from how_the_run_ended(origin.trace)


def _maker(found: Vanished) -> str:
    return found.maker.op if found.maker is not None else found.tensor.name or "the program"
