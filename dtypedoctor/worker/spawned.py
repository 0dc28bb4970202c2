"""Follows the processes that multiprocessing spawns: each leaves a trace of its own beside that of the script.

A spawned process first reads a dictionary that its parent has pickled for it. One more value is put into it, whose unpickling
begins the recording there, before the script's own module is imported again. Nothing else of multiprocessing is changed.
"""

import sys
from collections.abc import Callable, Mapping
from multiprocessing import util
from pathlib import Path
from typing import Any

from dtypedoctor.redaction.redact import forget_request, read_request, write_request_file
from dtypedoctor.trace.ranks import child_directory
from dtypedoctor.unpatched import from_json, getpid, to_json

MOST_FOLLOWED = 16
"""Processes that are followed; a pool or a loader may start any number."""
_LAST = -1000
"""Priority of what is done when a process ends: after everything that the program has asked for."""

_BEGIN = """
try:
    import sys
    sys.path.append({home!r})
    try:
        from dtypedoctor.worker.spawned import follow
    finally:
        sys.path.remove({home!r})
    follow({directory!r})
except Exception:
    pass
"""


class _Beginning:
    """Unpickled, it begins to record, and is None."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __reduce__(self) -> tuple[Any, ...]:
        home = str(Path(__file__).resolve().parents[2])
        return exec, (_BEGIN.format(home=home, directory=str(self._directory)), {})


class Spawned:
    """Has the processes that this one spawns record themselves.

    Args:
        request: what this process was asked to do, and they are, too.
        directory: where this process records.

    Attributes:
        count: processes that were spawned.
    """

    def __init__(self, request: Mapping[str, Any], directory: Path) -> None:
        self._request = dict(request)
        self._directory = directory.resolve()
        self._owner = getpid()
        self._original: Callable[[str], dict[str, Any]] | None = None
        self._spawn: Any = None
        self.count = 0

    def begin(self) -> None:
        """multiprocessing's module of that name has been imported."""
        # The package has no such attribute before its import is over.
        self._spawn = sys.modules["multiprocessing.spawn"]
        self._original = self._spawn.get_preparation_data
        self._spawn.get_preparation_data = self._prepared

    def end(self) -> None:
        """Puts back what was replaced."""
        if self._original is not None:
            self._spawn.get_preparation_data = self._original

    @property
    def not_followed(self) -> int:
        """Processes that were spawned and leave no trace."""
        return max(0, self.count - MOST_FOLLOWED)

    @property
    def followed(self) -> int:
        """Processes that were spawned and leave traces of their own."""
        return self.count - self.not_followed

    def _prepared(self, name: str) -> dict[str, Any]:
        assert self._original is not None  # it is called after begin()
        data = self._original(name)
        if getpid() == self._owner and name != "ignore":  # that is the fork server itself
            self.count += 1
            if self.count <= MOST_FOLLOWED:
                self._add(data)
        return data

    def _add(self, data: dict[str, Any]) -> None:
        place = child_directory(self._directory, self.count)
        request, repeats = self._request, self._request["repeats"]
        if repeats is not None:
            request = request | {"repeats": str(child_directory(Path("..") / repeats, self.count))}
        try:
            place.mkdir()
            write_request_file(place, to_json(request))
        except OSError:  # the disk is full: the process is spawned, and leaves no trace
            return
        data["dtypedoctor"] = _Beginning(place)


def follow(directory: str) -> None:
    """Records this process, which has just been spawned, into ``directory``."""
    from dtypedoctor.worker.script import ScriptRecording

    place = Path(directory)
    recording = ScriptRecording(from_json(read_request(place)), place)
    forget_request(place)
    recording.begin()

    def end() -> None:
        # multiprocessing calls it while it handles what has left the process's function
        recording.end(sys.exc_info()[1])

    def wait_for_end(_: object) -> None:
        util.Finalize(None, end, exitpriority=_LAST)

    wait_for_end(None)
    # Where multiprocessing forgets what there was before, it comes again.
    util.register_after_fork(recording, wait_for_end)
    _KEPT.append(recording)


_KEPT: list[object] = []
"""multiprocessing holds what it calls weakly."""
