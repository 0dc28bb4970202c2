"""Regular expressions that are compiled when they are first used, not when a module is imported.

The package has a hundred of them, 0.1 ms each; a run that finds nothing uses few.
"""

from collections.abc import Callable
from re import Pattern, RegexFlag, compile
from typing import TYPE_CHECKING, Any

__all__ = ["regex"]


class _Regex:
    """Has what the compiled pattern has."""

    _given = ("", 0)  # of a copy, before it has its own

    def __init__(self, text: str, flags: int) -> None:
        self._given = (text, flags)

    def __getattr__(self, name: str) -> Any:
        found = getattr(compile(*self._given), name)
        setattr(self, name, found)  # so the next use finds it without this method
        return found


if TYPE_CHECKING:
    regex: Callable[..., Pattern[str]]
else:

    def regex(text: str, flags: int | RegexFlag = 0) -> _Regex:
        """``re.compile(text, flags)``, made at its first use; functions of ``re`` do not take it in the place of a pattern."""
        return _Regex(text, flags)
