"""Rollouts: what a generator has written, with its log-probabilities, as a JSON object a line. Nothing here imports torch."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
