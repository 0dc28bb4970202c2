"""Which operand of a refused op has which dtype, as a person would count and call them."""

from dtypedoctor.diagnosis.mismatch.case import Case, Operand

__all__ = ["who_is_what"]

_NAMES = {
    "mm": ("self", "mat2"),
    "addmm": ("self", "mat1", "mat2"),
    "bmm": ("self", "mat2"),
    "baddbmm": ("self", "batch1", "batch2"),
    "addbmm": ("self", "batch1", "batch2"),
    "addmv": ("self", "mat", "vec"),
    "addr": ("self", "vec1", "vec2"),
}
"""Parameters of the operators in torch's native_functions.yaml, by family."""


def who_is_what(case: Case) -> str:
    """The dtype of every operand, the odd one first: ``Operand 2 (mat2) is bfloat16, operands 0 (self) and 1 (mat1) are float16``."""
    dtypes = list(dict.fromkeys(operand.dtype for operand in case.operands))
    if case.odd is not None:
        dtypes.sort(key=case.odd.dtype.__ne__)
    said = ", ".join(_those_of(case, [o for o in case.operands if o.dtype == dtype]) for dtype in dtypes)
    return said[:1].upper() + said[1:]


def _those_of(case: Case, operands: list[Operand]) -> str:
    names = _NAMES.get(case.family.rstrip("_"), ())
    known = names if len(names) == len(case.op.inputs) else ()
    called = [f"{o.index} ({known[o.index]})" if known else str(o.index) for o in operands]
    listed = " and ".join(part for part in (", ".join(called[:-1]), called[-1]) if part)
    return f"operand{'s' if len(called) > 1 else ''} {listed} {'are' if len(called) > 1 else 'is'} {operands[0].dtype}"
