"""Why a module's outputs have another dtype than its inputs, as far as the dtypes themselves tell."""

from collections.abc import Iterable

from dtypedoctor.dtypes import DTYPES
from dtypedoctor.trace.events import Flow

__all__ = ["why_it_changes"]


def why_it_changes(flow: Flow) -> str:
    """What makes ``flow``'s floating-point outputs differ in dtype from its inputs; empty where they do not differ.

    Torch's rules are asked in their order of precedence: autocast decides first, then type promotion among operands
    (https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc), then an explicit cast.
    """
    entering, leaving, weights = _floating(flow.inputs), _floating(flow.outputs), _floating(flow.weights)
    if not leaving or leaving <= entering:
        return ""
    if leaving == {flow.autocast}:
        return f"autocast runs it in {flow.autocast}"
    if not entering:  # an embedding; a container that is given token ids only hands on what is inside it
        return "it looks up values in the dtype of its weights" if leaving <= weights else ""
    promoted = _promoted(entering | weights)
    if leaving == {promoted} and promoted != _promoted(entering):
        return f"its {', '.join(sorted(weights))} weights promote the result to {promoted}"
    if leaving == {promoted}:
        return f"inputs of {' and '.join(sorted(entering))} are promoted to {promoted}"
    if leaving <= weights:
        return "it casts to the dtype of its weights"
    return "a cast inside it"


def _floating(dtypes: Iterable[str]) -> frozenset[str]:
    return frozenset(dtype for dtype in dtypes if dtype in DTYPES)


def _promoted(dtypes: frozenset[str]) -> str:
    widest = max(dtypes, key=lambda name: DTYPES[name].bits)
    same_width = {dtype for dtype in dtypes if DTYPES[dtype].bits == DTYPES[widest].bits}
    return widest if len(same_width) == 1 else "float32"  # float16 and bfloat16 meet in float32
