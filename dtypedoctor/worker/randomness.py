"""Lets a script that seeds nothing draw the same random numbers when it is run again.

Python's and numpy's generators begin with entropy of the system. Their first state is kept beside the trace of the first
run and set in the later ones. torch's begins with the same seed in every process anyway.
"""

import random
import sys
from pathlib import Path
from typing import Any

from dtypedoctor.unpatched import from_json, to_json

STATES = "random_states.json"


class RandomStates:
    """The generators' states at the beginning of a run.

    Args:
        directory: where they are kept.
        repeats: directory of the run whose states this one begins with; None for a run that begins with its own.
    """

    def __init__(self, directory: Path, repeats: Path | None) -> None:
        self._kept = directory / STATES
        self._states: dict[str, Any] = {}
        if repeats is not None and (repeats / STATES).exists():
            self._states = from_json((repeats / STATES).read_bytes())

    def begin(self) -> None:
        """The script is about to start."""
        if "python" in self._states:
            version, internal, gauss = self._states["python"]
            random.setstate((version, tuple(internal), gauss))
        else:
            self._keep("python", random.getstate())

    def numpy_is_there(self) -> None:
        """numpy's random module has been imported."""
        numpy_random: Any = sys.modules["numpy.random"]
        if "numpy" in self._states:
            numpy_random.set_state(tuple(self._states["numpy"]))
        else:
            name, keys, *rest = numpy_random.get_state()
            self._keep("numpy", (name, keys.tolist(), *rest))

    def _keep(self, name: str, state: Any) -> None:
        self._states[name] = state
        try:
            self._kept.write_text(to_json(self._states), encoding="ascii")
        except OSError:  # a full disk: the script goes on, and a second look at it may draw other numbers
            return
