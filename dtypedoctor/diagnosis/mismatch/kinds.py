"""What the operators of torch do with the dtypes of their operands. Names are without namespace and overload."""

from dtypedoctor.diagnosis.ops import overload_free
from dtypedoctor.trace.events import Op

__all__ = ["ACCUMULATIONS", "ATTENTION", "CASTS", "CONVOLUTIONS", "LIKE", "LOOKUPS", "MERGES", "PRODUCTS", "ROOTS", "UNCOMPUTED",
           "VIEWS", "WRITES_AT_INDEX", "is_dequantisation", "writes"]  # fmt: skip

VIEWS = frozenset({
    "t", "view", "_unsafe_view", "transpose", "permute", "reshape", "expand", "slice", "select", "unsqueeze", "squeeze",
    "alias", "detach", "contiguous", "clone", "split", "split_with_sizes", "chunk", "unbind", "as_strided", "unfold", "narrow",
    "_reshape_alias", "flatten", "movedim", "diagonal", "lift_fresh",
})  # fmt: skip
"""Ops that look at their operand in another way; chains leave them out."""

PRODUCTS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "_grouped_mm", "addbmm", "mv", "addmv", "dot"}
)
CONVOLUTIONS = frozenset(
    {"convolution", "_convolution", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d"}
)
"""With :data:`PRODUCTS` the ops that take one dtype only, so a weight among their operands decides it."""

CASTS = frozenset({"_to_copy", "to", "type_as"})
LIKE = frozenset({"empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros", "new_ones", "new_full",
                  "new_empty_strided", "rand_like", "randn_like"})  # fmt: skip
LOOKUPS = frozenset({"embedding", "embedding_bag", "_embedding_bag"})

ROOTS = frozenset({"rsqrt", "native_layer_norm", "native_group_norm", "native_batch_norm", "_native_batch_norm_legit",
                   "_fused_rms_norm", "linalg_vector_norm", "std", "var", "var_mean"})  # fmt: skip
"""Ops that a norm has upstream of the multiplication by its weight."""

UNCOMPUTED = frozenset({"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like"})
"""Ops whose result is memory that nobody has written to yet."""

MERGES = frozenset({"index_put", "_index_put_impl", "masked_scatter", "index_copy", "scatter", "slice_scatter"})
ACCUMULATIONS = frozenset({"index_add", "scatter_add", "scatter_reduce"})
WRITES_AT_INDEX = MERGES | ACCUMULATIONS
"""Ops that write a source into a destination of the same dtype, in place or into a copy of it."""

ATTENTION = frozenset({"scaled_dot_product_attention", "_scaled_dot_product_attention_math", "multi_head_attention_forward",
                       "_flash_attn_forward", "flash_attn_func"})  # fmt: skip


def is_dequantisation(op: Op) -> bool:
    """Whether an op unpacks quantised weights (bitsandbytes' operators, and those of others that say so)."""
    namespace, _, name = op.op.partition(".")
    return namespace != "aten" and "dequantize" in name


def writes(op: Op) -> bool:
    """Whether an op writes to memory that existed before."""
    return op.inplace or op.out_variant or overload_free(op.op) == "copy"
