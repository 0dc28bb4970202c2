"""Follows a trace that is still being written."""

import json
from dataclasses import dataclass
from pathlib import Path

from dtypedoctor.trace.writer import CURSOR, CURSOR_FORMAT, CURSOR_MAGIC, EVENTS


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
        if len(data) < CURSOR_FORMAT.size:
            return None
        _, step, _, site, magic = CURSOR_FORMAT.unpack(data[: CURSOR_FORMAT.size])
        if magic != CURSOR_MAGIC:
            return None
        if site not in self._sites:
            self._read_on()
        phase, fqn = self._sites.get(site, ("", ""))
        return Where(step=step, phase=phase, module=fqn)

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
                site = json.loads(line)
                self._sites[site["id"]] = (site.get("phase", ""), site.get("fqn", ""))
