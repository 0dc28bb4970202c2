"""Did-you-mean."""

from collections.abc import Iterable
from difflib import get_close_matches

__all__ = ["closest", "did_you_mean"]

# Nobody misspells an id into more than this, and comparing long texts takes quadratic time.
_LONGEST = 100


def closest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that ``word`` most likely means; None where nothing is near. Upper and lower case are alike."""
    if len(word) > _LONGEST:
        return None
    folded = {choice.lower(): choice for choice in choices}
    matches = get_close_matches(word.lower(), folded, n=1)
    return folded[matches[0]] if matches else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """The end of a sentence, ``; did you mean 'seed'?``, or an empty text where nothing is near."""
    match = closest(word, choices)
    return f"; did you mean '{match}'?" if match else ""
