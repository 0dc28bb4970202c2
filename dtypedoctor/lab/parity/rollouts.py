"""Rollouts: what a generator has written, with its log-probabilities, as a JSON object a line, and how far a trainer's are from these. Nothing here imports torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtypedoctor.errors import UsageError
from dtypedoctor.foreign_files import parse_json, read_file, reason

_PROMPT = ("prompt_ids", "prompt_token_ids", "prompt")
_COMPLETION = ("completion_ids", "token_ids", "output_ids", "response_ids", "completion")
_LOGPROBS = ("logprobs", "sampling_logprobs", "rollout_log_probs", "output_token_logprobs")
"""What TRL, vLLM, SGLang and veRL call them."""
_LARGEST = 1 << 30
"""Bytes of a file that is read."""
_ABOVE_ZERO = 1e-3
"""How far beyond 0 rounding may take a log-probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How a generator draws a token; each is off by default.

    Attributes:
        temperature: what logits are divided by; 0 takes the likeliest token.
        top_p, top_k, min_p: what a token has to pass: the likeliest ones with this probability, so many, those with this share of the likeliest one's probability.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0

    @property
    def truncates(self) -> bool:
        """Whether some tokens cannot be drawn."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A completion of a prompt.

    Attributes:
        line: where it stands in the file, from 1.
        prompt, completion: token ids.
        logprobs: natural logarithms, one for each token of the completion.
        sampling: how it was drawn.
    """

    line: int
    prompt: Sequence[int]
    completion: Sequence[int]
    logprobs: Sequence[float]
    sampling: Sampling

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Rollout":
        """The reverse of ``dataclasses.asdict``."""
        return cls(**{**data, "sampling": Sampling(**data["sampling"])})


def read_rollouts(path: Path, default: Sampling) -> list[Rollout]:
    """The rollouts of a JSONL file that have a token.

    Args:
        path: the file.
        default: how those were drawn that do not say it.

    Raises:
        UsageError: it cannot be read, has no rollout, or a line is none; with the line's number.
    """
    try:
        lines = read_file(path, _LARGEST, follow=True).splitlines()
    except OSError as error:
        raise UsageError(f"{path}: {reason(error)}", "Give a file with one JSON object a line.") from error
    rollouts = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rollouts.append(_rollout(parse_json(line), number, default))
            except ValueError as error:
                hint = f"A line is an object with {_PROMPT[0]}, {_COMPLETION[0]} and {_LOGPROBS[0]} of the same length."
                raise UsageError(f"{path}:{number}: {error}", hint) from error
    rollouts = [rollout for rollout in rollouts if rollout.completion]
    if not rollouts:
        raise UsageError(f"{path}: has no completion", "Give a file with one JSON object a line.")
    return rollouts


def _rollout(row: Any, line: int, default: Sampling) -> Rollout:
    if not isinstance(row, dict):
        raise ValueError(f"a JSON object is wanted, and this is {type(row).__name__}")  # noqa: TRY004
    row = {**row, **_inner(row, "meta_info"), **_inner(row, "sampling_params")}
    prompt, completion = _ids(row, _PROMPT), _ids(row, _COMPLETION)
    name, values = _first(row, _LOGPROBS)
    if not isinstance(values, list) or len(values) != len(completion):
        found = f"{len(values)} values" if isinstance(values, list) else f"no list ({type(values).__name__})"
        raise ValueError(f"{name}: has {found} for {len(completion)} tokens of the completion")
    if completion and not prompt:
        raise ValueError("the prompt has no token, so nothing predicts the first one of the completion")
    logprobs = [
        _logprob(value, token, f"{name}[{place}]")
        for place, (value, token) in enumerate(zip(values, completion, strict=True))
    ]
    # What a row says of how it was drawn; -1 and null switch off, as they do in the libraries
    values = {}
    for name in Sampling.__slots__:
        value = row.get(name, getattr(default, name))
        if value is None:
            continue
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"{name}: a number is wanted")
        values[name] = value
    values["top_k"] = max(0, int(values.get("top_k", 0)))
    sampling = Sampling(**values)
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1 or not 0 <= sampling.min_p <= 1:
        raise ValueError("temperature is at least 0, top_p above 0 and at most 1, min_p between 0 and 1")
    return Rollout(line=line, prompt=prompt, completion=completion, logprobs=logprobs, sampling=sampling)


def _inner(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """What SGLang and vLLM nest in a row."""
    inner = row.get(name)
    return inner if isinstance(inner, dict) else {}


def _first(row: Mapping[str, Any], names: Sequence[str]) -> tuple[str, Any]:
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        raise ValueError(f"has no {names[0]!r} (nor {', '.join(names[1:])})")
    return name, row[name]


def _ids(row: Mapping[str, Any], names: Sequence[str]) -> list[int]:
    name, values = _first(row, names)
    if not isinstance(values, list) or not all(type(value) is int and value >= 0 for value in values):
        raise ValueError(f"{name}: a list of token ids is wanted")
    return values


def _logprob(value: Any, token: int, name: str) -> float:
    """A number, SGLang's ``[logprob, id, text]``, or vLLM's ``{id: {"logprob": …}}``."""
    if isinstance(value, list) and value:
        value = value[0]
    if isinstance(value, dict):
        value = value.get(str(token), value)
        value = value.get("logprob") if isinstance(value, dict) else value
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{name}: a finite number is wanted")
    if value > _ABOVE_ZERO:
        raise ValueError(f"{name}: {value:.6g} is above 0, and so no logarithm of a probability")
    return float(value)


SAME, ROUNDING, GAP = "same", "rounding", "gap"
"""The verdicts: no gap, one that the dtype's rounding makes, and one that it does not."""
SAMPLING, WEIGHTS, PADDING, DTYPE, SHIFT = "sampling", "weights", "padding", "dtype", "shift"
"""What was changed."""
OF_ROUNDING = frozenset({PADDING, DTYPE})
"""Changes that may move scores by rounding alone."""
WHAT_TO_DO = {
    SAMPLING: (
        "Compare the same distribution on both sides: have the generator return raw log-probabilities, or renormalize the trainer's over the tokens "
        "that temperature, top-p and top-k leave (vLLM: `logprobs_mode`)."
    ),
    WEIGHTS: "Send the trained weights to the generator before it generates: merged once, in one dtype, and all of them.",
    PADDING: "Give the model the attention mask and positions that count from the first token that is no padding, or pad on the right.",
    DTYPE: "Compute both log-probabilities in one dtype. float16 has 3 bits more than bfloat16, and float32 leaves nothing.",
    SHIFT: "Pair each log-probability with its own token: logits at a position are those of the next one.",
}
"""What to do about the change that explains a gap."""
UNEXPLAINED = (
    "Try the generator's weights (`--with FOLDER`), and name temperature, top_p and top_k if the file does not. Then compare token ids, chat template, "
    "the generator's kernels and its KV cache's dtype."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Log-probabilities beside others of the same tokens.

    Attributes:
        tokens: compared.
        nonfinite: others, whose log-probability is inf or NaN.
        outside: share of them whose ratio is below 0.9 or above 1.1.
        mean, mean_abs, largest: of the difference, of its magnitude, and the largest magnitude.
        kl: mean of exp(d) - 1 - d, which estimates how far the policy is from the one that drew the tokens.
    """

    tokens: int
    nonfinite: int
    outside: float
    mean: float
    mean_abs: float
    largest: float
    kl: float

    @property
    def distance(self) -> float:
        """The mean magnitude, infinity where some are not finite."""
        return math.inf if self.nonfinite else self.mean_abs


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One thing changed, and the rollouts scored again.

    Attributes:
        kind: one of :data:`WHAT_TO_DO`.
        said: the change in words.
        gap: to the generator's log-probabilities.
        moves: how far the scores are from those without the change.
        on_top_of: changes that were made before it and stay.
        taken: whether it removes the most, so that further changes are made on top of it.
    """

    kind: str
    said: str
    gap: Gap
    moves: Gap
    on_top_of: tuple[str, ...] = ()
    taken: bool = False


@dataclass(slots=True, kw_only=True)
class Parity:
    """The gap of a generator and a trainer, and what it is made of.

    Attributes:
        model, rollouts: folder and file.
        rows: scored, of ``of_rows``.
        baseline: how the trainer is taken to score, in words.
        gap: of that to the generator.
        rounding: mean difference that rounding makes of the trainer's own scores.
        of_bfloat16: what bfloat16's makes of them.
        floor: mean difference that float32 leaves.
        changes: in the order in which they were tried.
        notes: measurements beside.
        not_tried: what was not changed, each with the reason.
    """

    model: str
    rollouts: str
    rows: int
    of_rows: int
    baseline: str
    gap: Gap
    rounding: float
    of_bfloat16: float
    floor: float
    changes: list[Change] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)

    @property
    def causes(self) -> list[Change]:
        """The changes that together leave at most half of the gap; empty where none do."""
        taken = [change for change in self.changes if change.taken]
        return taken if taken and taken[-1].gap.distance <= self.gap.distance / 2 else []

    @property
    def verdict(self) -> str:
        """:data:`SAME`, :data:`ROUNDING` or :data:`GAP`."""
        if self.gap.distance <= self.floor:
            return SAME
        named = {change.kind for change in self.causes} - OF_ROUNDING
        return GAP if named or self.gap.distance > 3 * self.rounding else ROUNDING

    def data(self) -> dict[str, Any]:
        """As JSON; :meth:`of` is the reverse."""
        return {"verdict": self.verdict, "causes": [change.said for change in self.causes], **asdict(self)}

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Parity":
        """From what :meth:`data` returns."""
        fields = {name: value for name, value in data.items() if name not in ("verdict", "causes")}
        changes = [
            Change(**change | {"gap": Gap(**change["gap"]), "moves": Gap(**change["moves"])})
            for change in fields["changes"]
        ]
        return cls(**fields | {"gap": Gap(**fields["gap"]), "changes": changes})
