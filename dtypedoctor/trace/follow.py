"""Follows a trace that is still being written."""

from dataclasses import dataclass
from pathlib import Path

from dtypedoctor.trace.cursor import CURSOR, read_mark
from dtypedoctor.trace.loader import DAMAGED
from dtypedoctor.trace.writer import EVENTS
from dtypedoctor.unpatched import from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """What a worker is doing at this moment."""

    step: int
    phase: str
    module: str


class Follower:
    """Reads the cursor and the descriptions of modules of a growing trace; never blocks, never fails."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._offset = 0
        self._sites: dict[int, tuple[str, str]] = {}

    def where(self) -> Where | None:
        """The module entered last; None before the first."""
        try:
            data = (self._directory / CURSOR).read_bytes()
        except OSError:
            return None
        mark = read_mark(data)
        if mark is None:
            return None
        if mark.site not in self._sites:
            self._read_on()
        phase, fqn = self._sites.get(mark.site, ("", ""))
        return Where(step=mark.step, phase=phase, module=fqn)

    def _read_on(self) -> None:
        try:
            with (self._directory / EVENTS).open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return
        whole, _, _ = data.rpartition(b"\n")
        self._offset += len(whole) + 1 if whole else 0
        for line in whole.split(b"\n"):
            if line.startswith(b'{"e":"site"'):
                try:
                    site = from_json(line)
                    self._sites[site["id"]] = (site.get("phase", ""), site.get("fqn", ""))
                except DAMAGED:  # somebody else writes here: what is going on is shown without it
                    continue
