"""Scores rollouts again as a trainer does, then with one thing changed, on top of what removes the most. Runs in a process of its own."""

import gc
import inspect
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtypedoctor.errors import DoctorError, UsageError, require_installed
from dtypedoctor.foreign_files import write_file
from dtypedoctor.lab.models.loading_errors import CANNOT_LOAD
from dtypedoctor.lab.parity.rollouts import DTYPE, PADDING, SAMPLING, SHIFT, WEIGHTS, Change, Gap, Parity, Rollout

LEFT, POSITIONS, RIGHT, ALONE = "left", "positions", "right", "alone"
"""How rows become batches: prompts padded on their left; the same with positions that count from the first token; all padding on the right; none."""
SCALED, RAW, TRUNCATED = "scaled", "raw", "truncated"
"""Which distribution is scored: logits over temperature, the model's own, or what truncation leaves of the first, renormalized."""
AUTOCAST = "autocast"
"""Float32 weights in a bfloat16 autocast region."""
_DTYPES = ("bfloat16", "float16", "float32")
_WORDS = {
    LEFT: "in batches padded on the left",
    POSITIONS: "with positions that count from the first token",
    RIGHT: "with padding on the right",
    ALONE: "one row at a time, without padding",
    SCALED: "over the temperature",
    RAW: "without temperature",
    TRUNCATED: "over the tokens that top-p, top-k and min-p leave",
    AUTOCAST: "in bfloat16 autocast",
}
_QUANTIZED = {"float8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
"""Formats of linear weights with a scale for each row, and the largest value of each."""
_KINDS = {
    "sampling": SAMPLING,
    "folder": WEIGHTS,
    "quantized": WEIGHTS,
    "layout": PADDING,
    "dtype": DTYPE,
    "shift": SHIFT,
}
"""What a field of :class:`Way` is about."""
_ROUNDS = 3
"""Changes that are made on top of each other at most."""
_WORTH = 0.75
"""Share of the mean difference that a change leaves at most to be made for good."""
_NEARLY = 1.1
"""What leaves less than this times the least is as good, and the first of those is taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A way to score.

    Attributes:
        folder: of the weights.
        dtype: in which the model is loaded, or :data:`AUTOCAST`.
        quantized: a format that linear weights are rounded to, the head's left out; see :data:`_QUANTIZED`.
        layout, sampling: see the constants above.
        shift: whether a token is given the log-probability of the next one.
    """

    folder: str
    dtype: str
    quantized: str = ""
    layout: str = LEFT
    sampling: str = SCALED
    shift: bool = False

    def changed(self, name: str) -> str:
        """A field in words."""
        value = getattr(self, name)
        if name == "folder":
            return f"with the weights of {value}"
        if name == "quantized":
            return f"with linear weights rounded to {value}, a scale for each row"
        if name == "shift":
            return "with each token's log-probability taken from the next one"
        return _WORDS.get(value, f"in {value}")


class Scorer:
    """Log-probabilities of the rollouts' tokens, one tensor for all of them, each way computed once."""

    def __init__(self, rows: Sequence[Rollout], name: str, device: str, batch_size: int) -> None:
        self.rows, self.name, self._device, self._batch_size = rows, name, device, batch_size
        self.recorded = torch.tensor([value for row in rows for value in row.logprobs], dtype=torch.float64)
        self.samplings = [SCALED]
        self.samplings += [RAW] if any(row.sampling.temperature not in (0, 1) for row in rows) else []
        self.samplings += [TRUNCATED] if any(row.sampling.truncates for row in rows) else []
        self._scores: dict[Way, Tensor] = {}
        self._loaded: tuple[tuple[str, ...], Any] = ((), None)

    def dtype_of(self, folder: str) -> str:
        """The dtype that the folder is saved in."""
        model = self._model(folder, "auto")
        dtypes = (tensor.dtype for tensor in model.parameters() if tensor.is_floating_point())
        return str(next(dtypes, torch.float32)).removeprefix("torch.")

    def scores(self, way: Way) -> Tensor:
        """Natural logarithms in float64, in the order of the rows.

        Raises:
            UsageError: the folder cannot be loaded, or a token is beyond its vocabulary.
        """
        if way not in self._scores:
            model = self._model(way.folder, "float32" if way.dtype == AUTOCAST else way.dtype, way.quantized)
            region = torch.autocast(self._device, torch.bfloat16) if way.dtype == AUTOCAST else nullcontext()
            with torch.inference_mode(), region:
                scored = [self._batch(model, rows, way.layout) for rows in self._batches(way.layout)]
            for sampling in self.samplings:
                parts = [part for batch in scored for part in batch[sampling]]
                self._scores[replace(way, sampling=sampling, shift=False)] = torch.cat(parts)
                self._scores[replace(way, sampling=sampling, shift=True)] = torch.cat([_shifted(p) for p in parts])
        return self._scores[way]

    def gap(self, way: Way) -> Gap:
        """To the generator's."""
        return gap_between(self.scores(way), self.recorded)

    def _model(self, folder: str, dtype: str, quantized: str = "") -> Any:
        key = (folder, dtype, quantized)
        if self._loaded[0] != key:
            self._loaded = ((), None)  # two are not held at once
            gc.collect()
            self._loaded = (key, _load(folder, dtype, self._device))
            self._check_ids(folder)
            if quantized:
                _quantize(self._loaded[1], quantized)
        return self._loaded[1]

    def _check_ids(self, folder: str) -> None:
        size = self._loaded[1].get_input_embeddings().weight.shape[0]
        for row in self.rows:
            largest = max(*row.prompt, *row.completion)
            if largest >= size:
                raise UsageError(
                    f"{self.name}:{row.line}: token id {largest} is beyond the vocabulary of {folder}, which has {size:,}",
                    "Give the model, and the tokenizer, that the rollouts were generated with.",
                )

    def _batches(self, layout: str) -> Iterator[Sequence[Rollout]]:
        size = 1 if layout == ALONE else self._batch_size
        yield from (self.rows[begin : begin + size] for begin in range(0, len(self.rows), size))

    def _batch(self, model: Any, rows: Sequence[Rollout], layout: str) -> dict[str, list[Tensor]]:
        inputs, predicted_from = _padded(rows, layout)
        keep = inputs["input_ids"].shape[1] - min(predicted_from)
        if "logits_to_keep" in inspect.signature(model.forward).parameters:
            inputs["logits_to_keep"] = keep  # a vocabulary is wide
        inputs = {name: each.to(model.device) if isinstance(each, Tensor) else each for name, each in inputs.items()}
        try:
            logits = model(**inputs, use_cache=False).logits[:, -keep:]
        except CANNOT_LOAD as error:
            lines = f"lines {rows[0].line} to {rows[-1].line}"
            raise UsageError(
                f"{self.name}: {lines}: the model raises {type(error).__name__}: {str(error)[:200]}"
            ) from error
        scored: dict[str, list[Tensor]] = {sampling: [] for sampling in self.samplings}
        for row, own, begin in zip(rows, logits, predicted_from, strict=True):
            begin -= min(predicted_from)
            own = own[begin : begin + len(row.completion)].float()
            for sampling in self.samplings:
                scored[sampling].append(_logprobs(own, row, sampling).double().cpu())
        return scored


def _load(folder: str, dtype: str, device: str) -> Any:
    require_installed(folder, ["transformers"])
    import transformers

    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
        return model.to(device).eval() if device != "cpu" else model.eval()
    except CANNOT_LOAD as error:
        lines = str(error).strip().splitlines() or [""]
        raise UsageError(f"{folder}: {type(error).__name__}: {lines[0][:300]}", "Give a folder that save_pretrained wrote.") from error  # fmt: skip


def _quantize(model: Any, quantized: str) -> None:
    """Rounds the weights of linear layers to a format, as engines do that quantize while they load."""
    dtype, largest = _QUANTIZED[quantized]
    for module in model.modules():
        if (
            isinstance(module, nn.Linear)
            and module.weight.is_floating_point()
            and module is not model.get_output_embeddings()
        ):
            weight = module.weight.data.float()
            scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-12) / largest
            codes = weight / scale if dtype.is_floating_point else (weight / scale).round()
            module.weight.data = (codes.to(dtype).float() * scale).to(module.weight.dtype)


def _padded(rows: Sequence[Rollout], layout: str) -> tuple[dict[str, Any], list[int]]:
    """The model's inputs, and for each row the position that predicts its first token."""
    widest = max(len(row.prompt) for row in rows)
    before = [0 if layout == RIGHT else widest - len(row.prompt) for row in rows]
    width = max(left + len(row.prompt) + len(row.completion) for left, row in zip(before, rows, strict=True))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for number, (left, row) in enumerate(zip(before, rows, strict=True)):
        tokens = torch.tensor([*row.prompt, *row.completion])
        ids[number, left : left + len(tokens)] = tokens
        mask[number, left : left + len(tokens)] = 1
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
    if layout == POSITIONS:
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return inputs, [left + len(row.prompt) - 1 for left, row in zip(before, rows, strict=True)]


def _logprobs(logits: Tensor, row: Rollout, sampling: str) -> Tensor:
    """Of the row's tokens, from float32 logits of shape (tokens, vocabulary)."""
    drawn = torch.tensor(row.completion, device=logits.device).unsqueeze(1)
    scaled = logits if sampling == RAW else logits / (row.sampling.temperature or 1.0)
    if sampling == TRUNCATED and row.sampling.truncates:
        kept = scaled
        for warper in _warpers(row):
            kept = warper(None, kept)
        # By rounding, a token may be left out here that the generator could draw
        scaled = kept.scatter(1, drawn, scaled.gather(1, drawn))
    return scaled.log_softmax(-1).gather(1, drawn).squeeze(1)


def _warpers(row: Rollout) -> Iterator[Any]:
    from transformers.generation import logits_process

    sampling = row.sampling
    if sampling.top_k:
        yield logits_process.TopKLogitsWarper(sampling.top_k)
    if sampling.top_p < 1:
        yield logits_process.TopPLogitsWarper(sampling.top_p)
    if sampling.min_p:
        yield logits_process.MinPLogitsWarper(sampling.min_p)


def _shifted(logprobs: Tensor) -> Tensor:
    return torch.cat([logprobs[1:], logprobs[-1:]])


def gap_between(scores: Tensor, recorded: Tensor) -> Gap:
    """How far log-probabilities are from others of the same tokens, both float64 and of one dimension."""
    every = scores - recorded
    apart = every[every.isfinite()]
    if not len(apart):
        return Gap(tokens=0, nonfinite=len(every), outside=0.0, mean=0.0, mean_abs=0.0, largest=0.0, kl=0.0)
    size, ratio = apart.abs(), apart.exp()
    return Gap(
        tokens=len(apart),
        nonfinite=len(every) - len(apart),
        outside=float(((ratio < 0.9) | (ratio > 1.1)).double().mean()),
        mean=float(apart.mean()),
        mean_abs=float(size.mean()),
        largest=float(size.max()),
        kl=float((torch.expm1(apart.clamp(max=80)) - apart).mean()),
    )


def split(model: str, scorer: Scorer, *, others: Sequence[str], dtype: str | None, of_rows: int) -> Parity:  # fmt: skip
    """Scores the rollouts as a trainer does, then with one thing changed each time.

    Args:
        model: the trained weights' folder.
        scorer: knows the rollouts.
        others: folders of weights that the generator may have had.
        dtype: in which the trainer computes; as saved without it.
        of_rows: how many it has.

    Raises:
        UsageError: a folder cannot be loaded, or a token is beyond its vocabulary.
    """
    way = Way(folder=model, dtype=dtype or scorer.dtype_of(model))
    first = scorer.scores(way)
    floor = 64 * torch.finfo(torch.float32).eps * (1 + float(scorer.recorded.abs().mean()))
    exact = scorer.scores(replace(way, dtype="float32"))
    narrow = gap_between(scorer.scores(replace(way, dtype="bfloat16")), exact).mean_abs
    result = Parity(
        model=model,
        rollouts=scorer.name,
        rows=len(scorer.rows),
        of_rows=of_rows,
        baseline=f"{model} in {way.dtype}, {_WORDS[LEFT]}, logits {_WORDS[SCALED]}, all tokens",
        gap=scorer.gap(way),
        rounding=max(gap_between(first, exact).mean_abs, floor),
        of_bfloat16=narrow,
        floor=floor,
    )
    _make_changes(scorer, way, others, result)
    result.notes += _notes(scorer, first)
    result.not_tried += _not_tried(scorer, others)
    return result


def _make_changes(scorer: Scorer, way: Way, others: Sequence[str], result: Parity) -> None:
    """Tries everything on top of what has removed the most, until nothing removes a quarter of what is left."""
    left = result.gap
    made: list[str] = []
    for _ in range(_ROUNDS):
        done = {change.kind for change in result.changes if change.taken}
        ways = [(name, each) for name, each in _alternatives(scorer, way, others) if _KINDS[name] not in done]
        here = scorer.scores(way)
        changes = [
            Change(
                kind=_KINDS[name],
                said=each.changed(name),
                gap=scorer.gap(each),
                moves=gap_between(scorer.scores(each), here),
                on_top_of=tuple(made),
            )
            for name, each in ways
        ]
        least = min((change.gap.distance for change in changes), default=math.inf)
        if least > _WORTH * left.distance or left.distance <= result.floor:
            result.changes += changes if not made else []
            return
        taken = next(number for number, change in enumerate(changes) if change.gap.distance <= _NEARLY * least)
        changes[taken] = replace(changes[taken], taken=True)
        result.changes += changes
        left, way = changes[taken].gap, ways[taken][1]
        made.append(changes[taken].said)


def _alternatives(scorer: Scorer, way: Way, others: Iterable[str]) -> Iterator[tuple[str, Way]]:
    """Ways that differ in one field, whose name comes with each; those that explain a gap without rounding come first."""
    yield from (("sampling", replace(way, sampling=each)) for each in scorer.samplings if each != way.sampling)
    yield "shift", replace(way, shift=not way.shift)
    yield from (("folder", replace(way, folder=each)) for each in others)
    yield from (("quantized", replace(way, quantized=each)) for each in _QUANTIZED)
    yield from (("layout", replace(way, layout=each)) for each in (POSITIONS, RIGHT, ALONE) if each != way.layout)
    yield from (("dtype", replace(way, dtype=each)) for each in (*_DTYPES, AUTOCAST) if each != way.dtype)


def _notes(scorer: Scorer, scores: Tensor) -> Iterator[str]:
    for dtype in (torch.bfloat16, torch.float16):
        values = scorer.recorded
        if len({*values.tolist()}) > 8 and torch.equal(values.to(dtype).double(), values):
            yield f"Each recorded value is exact in {str(dtype).removeprefix('torch.')}: they were rounded when stored. Keep them in float32."
    sizes = iter((scores - scorer.recorded).abs().tolist())
    sums = [sum(next(sizes) for _ in row.completion) for row in scorer.rows]
    worst = max(range(len(sums)), key=sums.__getitem__)
    if len(sums) > 4 and sums[worst] > sum(sums) / 2:
        yield f"More than half of the gap is in line {scorer.rows[worst].line} alone."


def _not_tried(scorer: Scorer, others: Sequence[str]) -> Iterator[str]:
    if not others:
        yield "other weights: none were named; give those that the generator had with --with FOLDER"
    if RAW not in scorer.samplings:
        yield "temperature: it is 1 in every row; rows or --temperature name another one"
    if TRUNCATED not in scorer.samplings:
        yield "top-p, top-k, min-p: no row has one; rows or --top-p, --top-k name them"


def main(request: dict[str, Any]) -> None:
    """Splits the gap that a request is about and writes what came of it, as JSON, to the request's ``result``."""
    device = request["device"]
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        rows = list(map(Rollout.of, request["rows"]))
        scorer = Scorer(rows, request["rollouts"], device, request["batch_size"])
        names = ("others", "dtype", "of_rows")
        answer = split(request["model"], scorer, **{name: request[name] for name in names}).data()
    except DoctorError as error:
        answer = {"message": error.message, "hint": error.hint}
    write_file(Path(request["result"]), json.dumps(answer))


if __name__ == "__main__":
    main(json.load(sys.stdin))
