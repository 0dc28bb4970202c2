"""Edits of the program's own source that remove the cause of a finding: made from the line that failed, or from the line that set a dtype.

Each maker reads the syntax tree of a file and gives changes of it, or none where it does not see exactly what to change. What comes out is
checked: applied line by line it still parses, and no line of it holds what may be a secret.
"""

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise

from dtypedoctor.diagnosis import dtype_edits, value_edits
from dtypedoctor.diagnosis.kept_copies import dtypes_in, still_copying
from dtypedoctor.diagnosis.rule import Edit
from dtypedoctor.diagnosis.scene import Change, Changes, Scene, Source, may_be_shown


def edits_for(scene: Scene, makers: Sequence[str]) -> Iterator[tuple[tuple[Edit, ...], str]]:
    """The lines that each maker changes which sees what to change, and its name; where none does, no lines, and the name of what would help."""
    shown: set[tuple[Edit, ...]] = {()}
    for name in value_edits.fitting(scene, tuple(makers)):
        made = MAKERS[name](scene) or []
        # One change, or several of which each may be the right one
        for source, changes in [made] if isinstance(made, tuple) else made:
            edits = _with_copies(scene, name, source, changes)
            if edits not in shown:
                shown.add(edits)
                yield edits, _name_of_cast(scene) if name == "cast-operand" else name
    if len(shown) == 1:
        yield (), "cast-written" if _is_a_write(scene) else ""


def _is_a_write(scene: Scene) -> bool:
    """Whether the operator that raised writes to one of its operands, whose dtype stays: so the others are cast, whichever is the odd one."""
    op = scene.rejected
    return op is not None and scene.finding.id == "operand-dtype-mismatch" and (op.inplace or op.out_variant)


def _name_of_cast(scene: Scene) -> str:
    """What a cast of what the failing line gives is called: whether an experiment on the operator has changed the same."""
    if _is_a_write(scene):
        return "cast-written"
    return "cast-operand" if dtype_edits.casts_every_operand(scene) else "cast-argument"


_OF_WEIGHTS = frozenset(
    {"set-float32", "cast-where-set", "cast-met-weights", "cast-weights-where-set", "weights-to-float32", "half-to-bfloat16", "half-to-float32", "bfloat16-to-float32"}
)  # fmt: skip
"""Makers that give weights another dtype."""


def _with_copies(scene: Scene, maker: str, changed: Source, changes: list[Change]) -> tuple[Edit, ...]:
    """The changed lines, with those that keep copies of weights from sharing the storage of the weights, in other files of the program too."""
    dtypes = dtypes_in(changes) if maker in _OF_WEIGHTS else set()
    edits = _checked(scene, changed, [*changes, *still_copying(changed, changes, dtypes)])
    for source in scene.imported_files() if edits and dtypes else ():
        if source.path != changed.path:
            also = _ELSEWHERE[maker](source) if maker in _ELSEWHERE else []
            edits += _checked(scene, source, [*also, *still_copying(source, also, dtypes)])
    return edits


_ELSEWHERE: dict[str, Callable[[Source], list[Change]]] = {
    "half-to-bfloat16": partial(dtype_edits.without_halves, dtype="bfloat16"),
    "half-to-float32": partial(dtype_edits.without_halves, dtype="float32"),
    "bfloat16-to-float32": dtype_edits.whole_in_float32,
}
"""Makers that change a whole program: what they change in its other files, and in the other cells of a notebook."""


def _checked(scene: Scene, source: Source, changes: list[Change]) -> tuple[Edit, ...]:
    """The changed lines; empty where the file is no Python once they are applied one by one, or has a line that must not be shown."""
    file = scene.shown(source.path)
    # split as bytes: a text has more ends of lines than Python's source has, form feeds for one
    before = [line.decode() for line in source.data.splitlines()]
    after = _lines_after(source.data, changes)
    edits = tuple(
        Edit(file=file, line=number, old=old, new=after[number])
        for number, old in enumerate(before, 1)
        if after.get(number, old) != old
    )
    try:
        ast.parse("\n".join(after.get(number, line) for number, line in enumerate(before, 1)))
    except (SyntaxError, ValueError, RecursionError):
        return ()
    return edits if all(may_be_shown(source, edit.line, edit.old, edit.new) for edit in edits) else ()


def _lines_after(data: bytes, changes: Iterable[Change]) -> Mapping[int, str]:
    """What stands in the place of each line (from 1): a line, several, or nothing; empty where one change lies inside of another.

    What replaces an expression of several lines stands in the first of them, with what follows the last.
    """
    ordered = sorted(dict.fromkeys(changes), key=lambda change: change[:2])
    if any(end > start for (_, end, _), (start, _, _) in pairwise(ordered)):
        return {}
    after: dict[int, str] = {}
    begin = done = 0
    for number, line in enumerate(data.splitlines(keepends=True), 1):
        end = begin + len(line)
        after[number] = ""
        if begin >= done:
            ends = [_end_of_line(data, last) for _, last, _ in _starting(ordered, data, begin, end) if last > end]
            done = max([end, *ends])
            after[number] = _changed(data[begin:done], begin, _starting(ordered, data, begin, done))
        begin = end
    return after


def _starting(changes: Iterable[Change], data: bytes, begin: int, end: int) -> list[Change]:
    """The changes that start between two places; what is added behind a last line that has no end belongs to it."""
    open_end = end == len(data) and not data.endswith(b"\n")
    return [change for change in changes if begin <= change[0] < end + open_end]


def _end_of_line(data: bytes, place: int) -> int:
    """Behind the end of the line that what comes before ``place`` is in."""
    return data.find(b"\n", place - 1) + 1 or len(data)


def _changed(part: bytes, begin: int, changes: Sequence[Change]) -> str:
    """A part of a file, which begins at ``begin``, with its changes, which are ordered; without the last end of a line."""
    for start, end, text in reversed(changes):
        part = part[: start - begin] + text + part[end - begin :]
    return part.decode().rstrip("\r\n").replace("\r\n", "\n")


_IN_BFLOAT16 = "The edit keeps memory and speed and gives up 3 of 11 bits of precision."
_UNCOMPILED = "The edit runs it uncompiled, in plain PyTorch's time."
_IN_FLOAT32 = "The edit computes all of it in float32: the simplest change, and the slowest."
_IN_REGION = "The edit keeps the dtype of the weights, so they train as before; products in the region are computed in half precision."
REMARKS = {
    "half-to-bfloat16": _IN_BFLOAT16,
    "half-to-float32": _IN_FLOAT32,
    "bfloat16-to-float32": _IN_FLOAT32,
    value_edits.OWN: "The edit changes what makes the tensors that this line updates; the weights keep their dtype.",
    "cast-argument": "The edit casts what this line calls a module with.",
    "lower-learning-rate": "The edit divides it by 100.",
    "autocast-around": _IN_REGION,
    "smaller-masks": "The edit masks with an eighth of it, so that the sum of several masks and the scores is finite too.",
    "skip-batch": "The edit leaves such batches out of the training; where their values come from it does not say.",
    "step-where-gradients": "The edit skips an optimizer without gradients, as its step without a scaler does: what it holds is not trained.",
    "finite-fill": "The edit fills in -1e4, which a mean survives: choose a value that fits the scale of yours.",
    "counter-in-tensor": "The edit keeps the number in a tensor, which is an input of the compiled code and no part of it.",
    "plain-linear-only": "The edit leaves layers of a subclass of nn.Linear unpacked, so they keep their memory.",
    "dequantized-weights": "The edit unpacks these weights in each call.",
    "shard-apart": "The edit gives these modules a unit, and an all-gather, of their own.",
    "without-compiler": _UNCOMPILED,
}
"""What an edit costs, or does besides the sentence above it."""
INSTEAD = {
    "autocast-around": "Call the model under autocast, which casts what meets in a product.",
    "cast-exported": "Cast what `{op}` gets to float32: it has no {dtype}.",
    "cast-weights-where-set": "Cast the {dtype} weights to {other}, the dtype of what they meet, on the line that made them {dtype}.",
    "cast-met-weights": "Cast the weights that meet it to {dtype}, on the line that gave them another dtype.",
    "weights-to-float32": "Keep the weights in float32, on the line that gave them half precision: the autocast region casts them where it computes.",
    "cast-written": "Cast what `{op}` writes to the dtype of the tensor that it writes to.",
    "region-on-device": "Name the device that the tensors are on in `torch.autocast`.",
}
"""The sentence itself, of makers that do something else than the finding's says."""

TRIED_AS = {
    "half-to-bfloat16": "bfloat16",
    "region-in-dtype-of-model": "autocast-dtype-of-model",
    "without-compiler": "compile-off",
}
"""Fixes that change a call or a run as an edit changes the program."""
ON_THE_OPERATOR = frozenset({"cast-operand", "cast-written", "cast-exported"})
"""Edits of the failing line that change what an experiment on the operator has changed."""

Maker = Callable[[Scene], Changes | list[Changes] | None]
MAKERS: dict[str, Maker] = {
    "cast-operand": dtype_edits.cast_operand,
    "cast-exported": dtype_edits.cast_exported,
    "cast-around": dtype_edits.cast_around,
    "make-in-dtype": dtype_edits.make_in_dtype,
    "cast-where-set": dtype_edits.cast_where_set,
    "cast-met-weights": dtype_edits.cast_met_weights,
    "cast-promoted-output": dtype_edits.cast_promoted_output,
    "cast-weights-where-set": dtype_edits.cast_where_set,
    "autocast-around": dtype_edits.autocast_around,
    "set-float32": dtype_edits.set_float32,
    "weights-to-float32": dtype_edits.set_float32,
    value_edits.OWN: value_edits.updated_in_float32,
    "half-to-bfloat16": dtype_edits.half_to_bfloat16,
    "half-to-float32": dtype_edits.half_to_float32,
    "bfloat16-to-float32": dtype_edits.bfloat16_to_float32,
    "uncast-line": dtype_edits.uncast_line,
    "region-in-dtype-of-model": dtype_edits.region_in_dtype_of_model,
    "region-without-cache": dtype_edits.region_without_cache,
    "region-on-device": dtype_edits.region_on_device,
    "custom-function-decorators": dtype_edits.custom_function_decorators,
    "without-integer-cast": dtype_edits.without_integer_cast,
    "plain-linear-only": dtype_edits.plain_linear_only,
    "dequantized-weights": dtype_edits.dequantized_weights,
    "shard-apart": dtype_edits.shard_apart,
    "lower-learning-rate": value_edits.lower_learning_rate,
    "domain-in-float32": value_edits.domain_in_float32,
    "keep-in-domain": value_edits.keep_in_domain,
    "finite-mask": value_edits.finite_mask,
    "finite-fill": value_edits.finite_fill,
    "smaller-masks": value_edits.smaller_masks,
    "skip-batch": value_edits.skip_batch,
    "optimizer-after-model": value_edits.optimizer_after_model,
    "step-where-gradients": value_edits.step_where_gradients,
    "without-scaler": value_edits.without_scaler,
    "without-compiler": value_edits.without_compiler,
    "compiled-for-any-size": value_edits.compiled_for_any_size,
    "counter-in-tensor": value_edits.counter_in_tensor,
}
