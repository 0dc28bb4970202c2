"""What torch's error messages about dtypes say: which family of operators raised, and which dtypes met.

The texts are those of torch 2.9 to 2.13 on a CPU and on CUDA, of its FSDP and checkpointing, and of flash-attn.
"""

import re
from dataclasses import dataclass

from dtypedoctor.trace.events import Raised

_DTYPE = r"(?:c10::|torch\.)?(\w+)"

PATTERNS: tuple[tuple[str, str], ...] = (
    ("product", rf"expected m(?:at)?1 and m(?:at)?2 to have the same dtype, but got: {_DTYPE} != {_DTYPE}"),
    ("biased-product", rf"mat1 and mat2 must have the same dtype, but got {_DTYPE} and {_DTYPE}"),
    ("accumulation", rf"self and mat2 must have the same dtype, but got {_DTYPE} and {_DTYPE}"),
    ("batched-product", rf"Input dtypes must be the same, got: input {_DTYPE}, batch1:? {_DTYPE}"),
    ("batched-product", rf"expected scalar type {_DTYPE} but found {_DTYPE}"),
    ("out", rf"Expected out tensor to have dtype {_DTYPE}, but got {_DTYPE} instead"),
    ("attention", r"Expected query, key, and value to have the same dtype"),
    ("attention", r"Expected attn_mask dtype to be bool or"),
    ("flash-attention", r"FlashAttention only support"),
    ("index-put", r"Index put requires the source and destination dtypes match"),
    ("index-add", rf"index_add_\(\): self \({_DTYPE}\) and source \({_DTYPE}\) must have the same scalar type"),
    ("index-copy", r"index_copy_\(\): self and source expected to have the same dtype"),
    ("scatter", r"scatter\(\): Expected self\.dtype to be equal to src\.dtype"),
    ("masked-scatter", r"masked_scatter: expected self and source to have same dtypes"),
    ("convolution", rf"Input type \({_DTYPE}\) and (?:bias|weight) type \({_DTYPE}\) should be the same"),
    ("norm", r"mixed dtype \(CPU\): expect parameter to have scalar type of"),
    ("recurrent", rf"RNN input dtype \({_DTYPE}\) does not match weight dtype \({_DTYPE}\)"),
    ("shards", r"Must flatten tensors with uniform dtype"),
    ("shards", r"FSDP expects uniform original parameter dtype"),
    ("shards", r"FSDP reduce-scatter expects uniform gradient dtype"),
    ("recompute", r"Recomputed values for the following tensors have different metadata"),
)
"""Family of operators and the message by which it rejects. What torch does not say more exactly than ``expected scalar type``
is counted as a batched product, the most frequent of them."""

_SPELLINGS = {
    "half": "float16", "float": "float32", "double": "float64", "bfloat16": "bfloat16", "byte": "uint8", "char": "int8",
    "long": "int64", "int": "int32", "short": "int16", "float16": "float16", "float32": "float32", "float64": "float64",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Complaint:
    """What a message says.

    Attributes:
        family: the family of operators that raised.
        dtypes: the dtypes that it names, in the order of the message; often empty.
    """

    family: str
    dtypes: tuple[str, ...]


def complaint_of(message: str) -> Complaint | None:
    """What ``message`` complains about; None for one that is not about dtypes, or not known."""
    for family, pattern in PATTERNS:
        found = re.search(pattern, message)
        if found is not None:
            return Complaint(family=family, dtypes=tuple(dtype_named(word) for word in found.groups()))
    return None


def dtype_named(word: str) -> str:
    """torch's name of a dtype that a message spells as in C++ (``Half``, ``c10::BFloat16``, ``float``)."""
    plain = word.removeprefix("c10::").removeprefix("torch.")
    return _SPELLINGS.get(plain.lower(), plain)


DTYPE_WORDS = ("dtype", "scalar type", "same type", "bias type", "Half", "BFloat16")
"""Words by which torch's messages about mixed dtypes are recognized."""
COMPILER_ERRORS = frozenset({"Unsupported", "FailOnRecompileLimitHit"})
"""Exceptions of Dynamo, which quote the code that it could not trace; that code may well speak of dtypes."""


def is_dtype_error(raised: Raised) -> bool:
    """Whether an exception complains about dtypes."""
    return raised.type not in COMPILER_ERRORS and any(word in raised.message for word in DTYPE_WORDS)
