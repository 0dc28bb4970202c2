"""Where the dtype of a tensor originates: the op trace is walked back from an operand until one named reason explains it.

In the middle: what torch's operators do with the dtypes of their operands. Names are without namespace and overload.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import prod

from dtypedoctor.diagnosis.ops import OpGraph, overload_free, writes
from dtypedoctor.diagnosis.rule import Link
from dtypedoctor.diagnosis.wording import module_of, shown_line
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.trace.events import Flow, Op, ParameterNote, Site, TensorNote
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import ModelConfig, ShardUnit

ADAPTER_LEVELS = 3
"""Levels above a low-rank weight at which the frozen weight that it adapts may sit (peft: two)."""


@dataclass(frozen=True)
class Census:
    """Parameters, buffers, classes and configurations of every outermost module of a trace."""

    trace: Trace

    @cached_property
    def _notes(self) -> dict[tuple[int, str], ParameterNote]:
        return {(note.root, note.name): note for note in self.trace.all(ParameterNote)}

    @cached_property
    def _classes(self) -> dict[tuple[int, str], str]:
        return {(site.root, site.fqn): site.cls for site in self.trace.all(Site) if site.cls}

    def note(self, root: int, name: str) -> ParameterNote | None:
        """The last note about a parameter or buffer."""
        return self._notes.get((root, name))

    def set_in(self, root: int, name: str, dtype: str) -> tuple[str | None, str]:
        """The program's own line that gave a parameter or buffer ``dtype`` (``train.py:31``), and what it calls; None where it is not known."""
        note = self.note(root, name)
        if note is None or note.dtype != dtype or note.set_at is None:
            return None, ""
        return shown_line(note.set_at), note.set_by

    def notes(self, root: int) -> Iterator[ParameterNote]:
        """All parameters and buffers of an outermost module, in the order in which its modules hold them."""
        return (note for (number, _), note in self._notes.items() if number == root)

    def class_of(self, root: int, fqn: str) -> str:
        """Class name of a module that was called, or an empty string."""
        return self._classes.get((root, fqn), "")

    def dtype_of(self, root: int) -> str | None:
        """The dtype that a model is in: that of most of its weights, packed ones and (where others are frozen) trainables aside.

        None for a model without floating-point parameters, or where two dtypes hold equally much.
        """
        dense = list(filter(_is_dense, self.notes(root)))
        frozen = [note for note in dense if not note.requires_grad]
        elements: Counter[str] = Counter()
        for note in frozen or dense:
            elements[note.dtype] += prod(note.shape)
        ranked = elements.most_common(2)
        if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
            return None
        return ranked[0][0]

    def weights_in_words(self, root: int) -> str:
        """How many elements of a model's weights are in which dtype: frozen, trainable, and packed ones by what they unpack to."""
        elements: Counter[str] = Counter()
        for note in self.notes(root):
            if note.quant is not None:
                elements[f"packed ({note.quant.get('dtype') or note.dtype} when unpacked)"] += prod(_shape(note))
            elif not note.buffer and note.dtype in DTYPES:
                elements[f"{'trainable' if note.requires_grad else 'frozen'} {note.dtype}"] += prod(note.shape)
        return ", ".join(f"{count:,} {words}" for words, count in elements.most_common())

    def is_head(self, root: int, fqn: str) -> bool:
        """Whether a module holds the model's last weight matrix."""
        owners = [module_of(note.name) for note in self.notes(root) if not note.buffer and len(note.shape) >= 2]
        return bool(owners) and owners[-1] == fqn

    def is_adapter(self, root: int, name: str) -> bool:
        """Whether a parameter is a low-rank update: trainable beside a larger frozen matrix that shares a dimension with it."""
        note = self.note(root, name)
        if note is None or len(note.shape) != 2 or not note.requires_grad:
            return False
        container = module_of(name)
        for _ in range(ADAPTER_LEVELS):
            container = module_of(container)
            if container and any(_adapts(note, other) for other in self._inside(root, container)):
                return True
        return False

    def saved_copy(self, root: int, fqn: str) -> str | None:
        """The peft wrapper that keeps a fully trained copy of a module (``modules_to_save``) and holds ``fqn``, if any."""
        while fqn:
            fqn = module_of(fqn)
            if self.class_of(root, fqn) == "ModulesToSaveWrapper":
                return fqn
        return None

    def keeper(self, root: int, fqn: str) -> str | None:
        """The entry of the model's keep-in-float32 list that names a module, if any."""
        for seen in self.trace.observed(ModelConfig):
            if seen.what.root != root:
                continue
            prefix = seen.fqn or ""
            if not prefix or fqn == prefix or fqn.startswith(f"{prefix}."):
                entry = next((e for e in seen.what.keep_in_fp32 if e in fqn), None)
                if entry is not None:
                    return entry
        return None

    def loaded_with(self, root: int, fqn: str, dtype: str) -> str:
        """The outermost module around ``fqn``, the model itself aside, whose floating-point parameters are all ``dtype``."""
        found, around = fqn, module_of(fqn)
        while around and all(
            n.dtype == dtype for n in self._inside(root, around) if not n.buffer and n.dtype in DTYPES
        ):
            found, around = around, module_of(around)
        return found

    def config_dtype(self, root: int) -> str | None:
        """The dtype that the model's configuration states, where it has one."""
        own = (seen.what for seen in self.trace.observed(ModelConfig) if not seen.fqn)
        return next((config.dtype for config in own if config.root == root and config.dtype), None)

    def packed_in(self, root: int, fqn: str) -> Iterator[ParameterNote]:
        """The packed weights that a module holds itself."""
        return (note for note in self.notes(root) if note.quant is not None and module_of(note.name) == fqn)

    def _inside(self, root: int, container: str) -> Iterator[ParameterNote]:
        return (note for note in self.notes(root) if note.name.startswith(f"{container}."))


def _is_dense(note: ParameterNote) -> bool:
    """Whether a note is of a floating-point parameter that is not packed."""
    return not note.buffer and note.quant is None and note.dtype in DTYPES


def _shape(note: ParameterNote) -> list[int]:
    return list(note.quant.get("shape") or note.shape) if note.quant is not None else note.shape


def _adapts(adapter: ParameterNote, base: ParameterNote) -> bool:
    shape = _shape(base)
    if base.requires_grad or base.buffer or len(shape) != 2:
        return False
    return bool(set(adapter.shape) & set(shape)) and min(adapter.shape) < min(shape)


class Reason(StrEnum):
    """Why a tensor has its dtype; the values are what reports say."""

    NORM = "norm"
    """The weight of a norm."""
    BUFFER = "buffer"
    EMBEDDING = "embedding"
    AUTOCAST_LIST = "autocast-list"
    """An op on autocast's own list, whose operands or result it casts."""
    QUANT_STATE = "quant-state"
    """What a packed weight was dequantized to."""
    REINTERPRETED = "reinterpreted"
    """A packed weight, dequantized to one format and read as another."""
    COMPUTE_DTYPE = "compute-dtype"
    """A 4-bit layer that computes in a dtype of its own."""
    ADAPTER = "adapter"
    MODULES_TO_SAVE = "modules-to-save"
    """peft's fully trained copy of a module."""
    KEEP_IN_FP32 = "keep-in-fp32"
    """A parameter that the model's keep list left in float32."""
    FSDP_OUTPUT = "fsdp-output"
    """The output dtype of a shard unit's mixed-precision policy."""
    ATTRIBUTE = "attribute"
    """A tensor that is a plain attribute of a module, which ``module.to(dtype)`` does not touch."""
    CACHE = "cache"
    """Memory that outlives the call and is written to in it."""
    MODEL_INPUT = "model-input"
    LOAD_DTYPE = "load-dtype"
    """A parameter that is in this dtype for no reason that the trace shows: it was made or loaded so."""
    INPLACE = "inplace"
    """An op that writes to memory which exists already, where autocast casts nothing."""
    CUSTOM_FUNCTION = "custom-fwd"
    """A custom autograd function that does not carry its autocast region over into the backward pass, or carries it too far."""
    CAST = "cast"
    """A cast that the code asks for."""
    FACTORY = "factory"
    """A tensor made on the spot (``torch.zeros``), in the default dtype or one that was named."""
    ELSEWHERE = "elsewhere"
    """Nothing that the trace shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeOrigin:
    """Where the dtype of a tensor comes from.

    Attributes:
        reason: the named reason.
        dtype: the dtype.
        root, fqn: the module where it originates: the one that holds the tensor ``name``, else the one whose code ran.
        name: the parameter, buffer, attribute, input or packed weight that gave the dtype, where it is one.
        op: the op at which the tensor got this dtype; None where no op of the window did.
        promoted: the op of mixed dtypes, nearest to the origin, whose result took over the wider one.
        quant_dtype: the dtype that was dequantized to, where the tensor goes back to a packed weight.
        set_at, set_by: the program's own line that gave the tensor ``name`` this dtype (``train.py:31``), and what it calls there.
        chain: from the operand back, views left out; the last link names the reason.
    """

    reason: Reason
    dtype: str
    root: int
    fqn: str | None
    name: str | None = None
    op: Op | None = None
    promoted: Op | None = None
    quant_dtype: str | None = None
    set_at: str | None = None
    set_by: str = ""
    chain: tuple[Link, ...] = ()


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


def is_dequantization(op: Op) -> bool:
    """Whether an op unpacks quantized weights (bitsandbytes' operators, and those of others that say so)."""
    namespace, _, name = op.op.partition(".")
    return namespace != "aten" and "dequantize" in name


MAX_LINKS = 12
"""Links of a chain that are kept, from both of its ends."""
MAX_WALK = 2000
MAX_CASTS = 8
"""Casts in a row that are looked behind."""
CALL_DEPTH = 40
"""How many ops above a cast an operand of its module is looked for."""
NORM_DEPTH = 8
"""How many ops above a multiplication by a weight the root of a mean square may lie, for it to be a norm."""


class Provenance:
    """Answers where dtypes come from.

    Args:
        graph: the op trace.
        census: what is known of the models.
    """

    def __init__(self, graph: OpGraph, census: Census) -> None:
        self.graph = graph
        self.census = census

    def of(self, tensor: TensorNote, user: Op) -> DtypeOrigin:
        """Where the dtype of ``tensor``, an operand of ``user``, originates."""
        return _Walk(self, tensor.dtype).back(tensor, user)

    def before_casts(self, origin: DtypeOrigin) -> DtypeOrigin:
        """Where a tensor comes from that was cast (by autocast or by name) before it got to where it is."""
        for _ in range(MAX_CASTS):
            cast = origin.op if origin.reason in (Reason.CAST, Reason.AUTOCAST_LIST) else None
            source = next((t for t in cast.inputs if t.dtype in DTYPES), None) if cast is not None else None
            if cast is None or source is None:
                break
            earlier = self.of(source, cast)
            origin = replace(earlier, chain=(*origin.chain[:-1], *earlier.chain))
        return origin

    def maker(self, tensor: TensorNote, user: Op) -> Op | None:
        """The op that made ``tensor``, or else the last one before ``user`` that wrote to its memory."""
        made = self.graph.producer(tensor)
        if made is not None and made.n < user.n:
            return made
        return self.graph.last_write(tensor, user)

    def refilled(self, tensor: TensorNote, user: Op) -> Op | None:
        """The op that filled memory which a module holds with the bits of another dtype: its name says nothing of its values then."""
        if tensor.origin not in ("attribute", "buffer"):
            return None
        wrote = self.graph.last_write(tensor, user)
        return wrote if wrote is not None and _reads_bits(wrote, tensor) else None

    def stored(self, tensor: TensorNote, user: Op) -> TensorNote | None:
        """The parameter whose storage an integer operand is, through views and joins; None where it is none."""
        waiting = [(tensor, user)]
        for _ in range(MAX_WALK):
            if not waiting:
                return None
            tensor, user = waiting.pop()
            if tensor.origin in ("parameter", "buffer", "attribute"):
                return tensor
            maker = self.graph.producer(tensor)
            if maker is not None and maker.n < user.n:
                waiting += [(t, maker) for t in reversed(maker.inputs) if t.dtype == tensor.dtype]
        return None

    def reason_of_parameter(self, name: str, user: Op) -> Reason:
        """Why a parameter that ``user`` works with is in its dtype, or what it is."""
        owner = module_of(name)
        if overload_free(user.op) in LOOKUPS:
            return Reason.EMBEDDING
        if self.census.saved_copy(user.root, owner) is not None:
            return Reason.MODULES_TO_SAVE
        if self.census.is_adapter(user.root, name):
            return Reason.ADAPTER
        if self._is_norm(user):
            return Reason.NORM
        return Reason.KEEP_IN_FP32 if self.census.keeper(user.root, owner) is not None else Reason.LOAD_DTYPE

    def _is_norm(self, op: Op) -> bool:
        """Whether an op multiplies by the weight of a norm: in the same module, not far above it, is a root mean square."""
        level, seen = [op], {op.n}
        for _ in range(NORM_DEPTH):
            if any(overload_free(one.op) in ROOTS for one in level):
                return True
            level = [maker for maker in self._above(level) if maker.fqn == op.fqn and maker.n not in seen]
            seen.update(maker.n for maker in level)
        return False

    def _above(self, level: list[Op]) -> list[Op]:
        """The ops that made the operands of ``level``; what a module holds or was given is not followed."""
        return self.graph.makers(tensor for op in level for tensor in op.inputs if not tensor.origin)

    def reason_of_cast(self, op: Op, dtype: str) -> Reason:
        """Why ``op`` gave its result a dtype that no operand has."""
        if op.autocast == dtype and overload_free(op.op) in CASTS:
            return Reason.AUTOCAST_LIST
        packed = self.census.packed_in(op.root, op.fqn)
        if any(note.quant is not None and note.quant.get("compute_dtype") == dtype for note in packed):
            return Reason.COMPUTE_DTYPE
        return Reason.CAST

    def casts_back_to(self, cast: Op, dtype: str) -> tuple[TensorNote, Op] | None:
        """The operand that the module of a cast was given in ``dtype`` and the cast goes back to, with the op that used it.

        That is an operand which the casted value was computed from, ``layer(x).to(x.dtype)``, or one that its result is combined
        with, ``mask.to(x.dtype) + x``. None where the module got no such operand, or where it gives ``dtype`` back for others too.
        """
        cls = self.census.class_of(cast.root, cast.fqn)
        flows = (flow for flow in self.graph.trace.all(Flow) if cls and flow.cls == cls)
        if any(dtype in flow.outputs and dtype not in flow.inputs for flow in flows):
            return None

        level, seen = [cast], {cast.n}
        for _ in range(CALL_DEPTH):
            for op in level:
                for tensor in op.inputs:
                    if tensor.dtype == dtype and self._was_given(tensor, cast):
                        return tensor, op
            inside = {op.n: op for op in self._above(level) if _is_inside(op, cast) and op.n not in seen}
            seen.update(inside)
            level = list(inside.values())

        made = {tensor.id for tensor in cast.outputs}
        for user in self.graph.downstream(cast, 1):
            floats = [tensor for tensor in user.inputs if tensor.dtype in DTYPES]
            if _is_inside(user, cast) and {t.dtype for t in floats} == {dtype}:
                others = (t for t in floats if t.id not in made and self._was_given(t, cast))
                return next(((t, user) for t in others), None)
        return None

    def _was_given(self, tensor: TensorNote, cast: Op) -> bool:
        """Whether a tensor came into the module of ``cast`` from outside, before it."""
        if tensor.origin:
            return tensor.origin == "input"
        maker = self.graph.producer(tensor)
        return maker is not None and maker.n < cast.n and not _is_inside(maker, cast)

    def shard_unit(self, op: Op, dtype: str) -> str | None:
        """The shard unit whose policy casts its outputs to ``dtype``, where ``op`` casts a result of that unit."""
        made = next(iter(self.graph.makers(op.inputs)), None)
        for unit in self.graph.trace.observed(ShardUnit):
            fqn = unit.fqn or ""
            inside = made is not None and (not fqn or f"{made.fqn}.".startswith(f"{fqn}."))
            if inside and unit.what.output_dtype == dtype:
                return fqn
        return None

    def unit_before(self, user: Op, dtype: str) -> str | None:
        """The shard unit that returned right before ``user``, in a call that a rank has made again alone, and whose policy casts its outputs to ``dtype``."""
        trace = self.graph.trace
        cast = {unit.fqn for unit in trace.observed(ShardUnit) if unit.what.output_dtype == dtype}
        before = (flow for flow in trace.all(Flow) if flow.n < user.n and flow.call == user.call)
        last = max(before, key=lambda flow: flow.n, default=None)
        return last.fqn if last is not None and last.fqn in cast else None


class _Walk:
    """One walk up the op trace, looking for the origin of one dtype."""

    def __init__(self, known: Provenance, dtype: str) -> None:
        self._known = known
        self._dtype = dtype
        self._links: list[Link] = []
        self._promoted: Op | None = None

    def back(self, tensor: TensorNote, user: Op) -> DtypeOrigin:
        """The origin of the dtype of ``tensor``."""
        for _ in range(MAX_WALK):
            refilled = self._known.refilled(tensor, user)
            if tensor.origin and tensor.dtype == self._dtype and refilled is None:
                return self._end(self._named(tensor, user))
            maker = refilled or self._known.maker(tensor, user)
            if maker is None:
                break
            origin = self._dequantized(maker) if is_dequantization(maker) else self._begins_at(maker, tensor)
            self._link(maker, tensor.dtype)
            is_cast = origin is not None and origin.reason in (Reason.CAST, Reason.FACTORY) and not maker.by_name
            given = None
            if is_cast and overload_free(maker.op) in CASTS:  # its dtype may be that of an operand of its module
                given = self._known.casts_back_to(maker, self._dtype)
            if given is not None:
                tensor, user = given
                continue
            if origin is not None:
                return self._end(origin)
            following = self._follow(maker, tensor)
            if following is None:
                break
            tensor, user = following, maker
        origin = self._originates(Reason.ELSEWHERE, user)
        unit = self._known.unit_before(user, self._dtype) if self._known.graph.producer(tensor) is None else None
        if unit is None and tensor.made_at and tensor.dtype == self._dtype:
            return self._made_outside(origin, tensor)
        return self._end(origin if unit is None else replace(origin, reason=Reason.FSDP_OUTPUT, fqn=unit))

    def _begins_at(self, maker: Op, tensor: TensorNote) -> DtypeOrigin | None:
        """The origin, if ``maker`` is where the dtype begins; None where it took it over from an operand."""
        if tensor.dtype != self._dtype or _reads_bits(maker, tensor) or writes(maker):
            return None
        # What a result may have its dtype from: floating-point operands, and for whole numbers those of the dtype
        floats = [tensor for tensor in maker.inputs if tensor.dtype in DTYPES or tensor.dtype == self._dtype]
        same = [tensor for tensor in floats if tensor.dtype == self._dtype]
        if not same and (not floats or overload_free(maker.op) in LIKE):
            return self._originates(Reason.FACTORY, maker)
        if not same:
            origin = self._originates(self._known.reason_of_cast(maker, self._dtype), maker)
            unit = self._known.shard_unit(maker, self._dtype) if origin.reason is Reason.CAST else None
            return origin if unit is None else replace(origin, reason=Reason.FSDP_OUTPUT, fqn=unit)
        known = DTYPES.get(self._dtype)
        if known is not None and any(DTYPES[t.dtype].bits < known.bits for t in floats):
            self._promoted = maker

        # A parameter or buffer decides it. Where all operands agree, it does so in ops that take one dtype only: elsewhere the other may have had it first
        held = next((t for t in same if t.origin in ("parameter", "buffer")), None)
        decides = overload_free(maker.op) in PRODUCTS | CONVOLUTIONS or not len(same) == len(floats) > 1
        return self._named(held, maker) if held is not None and decides else None

    def _follow(self, maker: Op, tensor: TensorNote) -> TensorNote | None:
        """The operand that ``tensor`` has its dtype from; for bits that are read as another dtype, where they come from."""
        if _reads_bits(maker, tensor) or tensor.dtype != self._dtype:
            return next(reversed(maker.inputs), None)
        same = [operand for operand in maker.inputs if operand.dtype == self._dtype]
        if overload_free(maker.op) == "copy" and maker.inputs[-1] in same:
            return maker.inputs[-1]  # the memory had that dtype already; what is in it now says more
        if writes(maker):  # an op in place, or with out=, keeps the dtype of the memory that it writes to
            return next((operand for operand in maker.inputs if operand.storage == tensor.storage), None)
        return min(same, key=lambda operand: bool(operand.origin))  # one that an op has computed says more

    def _named(self, tensor: TensorNote, user: Op) -> DtypeOrigin:
        name = tensor.name or ""
        others = {"buffer": Reason.BUFFER, "attribute": Reason.ATTRIBUTE, "input": Reason.MODEL_INPUT}
        reason = others.get(tensor.origin) or self._known.reason_of_parameter(name, user)
        fqn = user.fqn if tensor.origin == "input" else module_of(name)
        if reason is Reason.LOAD_DTYPE:
            fqn = self._known.census.loaded_with(user.root, fqn, tensor.dtype)
        at = tensor.made_at or None  # of an input, where that is known
        return replace(self._originates(reason, user), fqn=fqn, name=name, set_at=at, set_by=tensor.made_by)

    def _dequantized(self, maker: Op) -> DtypeOrigin:
        packed = next((t for t in maker.inputs if t.origin and t.dtype not in DTYPES), None)
        dtype = maker.outputs[0].dtype
        origin = self._originates(Reason.QUANT_STATE if dtype == self._dtype else Reason.REINTERPRETED, maker)
        if packed is None or packed.name is None:
            return replace(origin, quant_dtype=dtype)
        return replace(origin, fqn=module_of(packed.name), name=packed.name, quant_dtype=dtype)

    def _originates(self, reason: Reason, op: Op) -> DtypeOrigin:
        return DtypeOrigin(reason=reason, dtype=self._dtype, root=op.root, fqn=op.fqn, op=op)

    def _link(self, maker: Op, dtype: str) -> None:
        if overload_free(maker.op) in VIEWS and maker.op != "aten.view.dtype":
            return
        floats = [t.dtype for t in maker.inputs if t.dtype in DTYPES]
        dtype_in = next((d for d in floats if d != dtype), floats[0] if floats else None)
        self._links.append(Link(fqn=maker.fqn, op=maker.op, dtype_in=dtype_in, dtype_out=dtype, source=maker.source))

    def _made_outside(self, origin: DtypeOrigin, tensor: TensorNote) -> DtypeOrigin:
        """The origin at the line outside of modules that gave a tensor its dtype."""
        last = Link(fqn=None, op=tensor.made_by, dtype_in=None, dtype_out=tensor.dtype, source=tensor.made_at)
        chain = (*self._links, last)
        return replace(origin, promoted=self._promoted, chain=chain, set_at=tensor.made_at, set_by=tensor.made_by)

    def _end(self, origin: DtypeOrigin) -> DtypeOrigin:
        what = f"{origin.reason}: {origin.name}" if origin.name else str(origin.reason)
        source = origin.op.source if origin.op is not None else None
        set_at, set_by = origin.set_at, origin.set_by
        if set_at is None:
            set_at, set_by = self._known.census.set_in(origin.root, origin.name or "", origin.dtype)
        if set_at is not None:
            source = set_at
            what += f" ({set_by})" if set_by else ""
        last = Link(fqn=origin.fqn, op=what, dtype_in=None, dtype_out=origin.quant_dtype or origin.dtype, source=source)
        links = self._links
        kept = links if len(links) < MAX_LINKS else [*links[: MAX_LINKS // 2], *links[-MAX_LINKS // 2 :]]
        return replace(origin, promoted=self._promoted, chain=(*kept, last), set_at=set_at, set_by=set_by)


def _is_inside(op: Op, cast: Op) -> bool:
    """Whether an op ran in the same call, in the module of ``cast`` or in one inside it."""
    inside = not cast.fqn or f"{op.fqn}.".startswith(f"{cast.fqn}.")
    return (op.call, op.root) == (cast.call, cast.root) and inside


def _reads_bits(op: Op, tensor: TensorNote) -> bool:
    """Whether ``op`` wrote the memory of ``tensor`` in another dtype than it is read in."""
    if op.op == "aten.view.dtype":
        return True
    return all(t.id != tensor.id for t in op.outputs) and any(
        t.storage == tensor.storage != 0 and t.dtype != tensor.dtype for t in op.outputs
    )
