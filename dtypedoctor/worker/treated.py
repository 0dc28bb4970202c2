"""Puts corrections into the process of a script: into a library as soon as that is imported, or into the script's model.

:func:`serve` runs a script with them and nothing else: no instruments, no trace, no count of uses. What the script does beside that, its
output and its exit status are its own. A script that is watched takes :class:`EditedLibrary` from here. Nothing imports torch before the
script does, so a correction is in place before its first line.
"""

import atexit
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dtypedoctor.interruptions import noticing
from dtypedoctor.plugins import Edit
from dtypedoctor.source_edits import AlreadyCorrectedError, Hit, TargetMismatchError, install, release_of
from dtypedoctor.trace.events import Correction
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.unpatched import from_json
from dtypedoctor.worker import main_module
from dtypedoctor.worker.on_import import after_import
from dtypedoctor.worker.recording import hide_in_excepthook, hide_own_frames

if TYPE_CHECKING:
    from torch import nn


class EditedLibrary:
    """One correction that consists of edits.

    Args:
        name: id of the correction.
        library: the library of ``edits``, as it is imported.
        edits: what becomes of its source.
        counted: count the uses of the corrected lines; without it they cost nothing.
        changed: called when all edits are in place, and when they cannot be.

    Attributes:
        places: ``file:line`` of each edit that is in place.
        release: the library's version, where its metadata says so.
        error: why the correction is not in place, once its library is imported.
        hits: how often corrected lines have run.
        acted: how often that made a difference.
    """

    def __init__(
        self,
        name: str,
        library: str,
        edits: Sequence[Edit],
        *,
        counted: bool,
        changed: "Callable[[EditedLibrary], None]",
    ) -> None:
        self.name = name
        self.library = library
        self.places: list[str] = []
        self.release = ""
        self.error: TargetMismatchError | None = None
        self.hits = 0
        self.acted = 0
        self._edits = edits
        self._hit: Hit | None = self._count if counted else None
        self._changed = changed
        self._undoing: list[Callable[[], None]] = []

    @property
    def installed(self) -> bool:
        """Whether every edit is in place."""
        return len(self.places) == len(self._edits)

    @property
    def corrected_already(self) -> bool:
        """Whether the library has the correction itself, so that there is nothing to do."""
        return isinstance(self.error, AlreadyCorrectedError)

    @property
    def reason(self) -> str:
        """Why the correction is not in place, in words; empty if it is."""
        if self.installed:
            return ""
        if self.error is not None:
            return f"{TargetMismatchError.__name__}: {self.library}{f' {self.release}' if self.release else ''}: {self.error}"
        return f"{TargetMismatchError.__name__}: the script has not imported {self._edits[len(self.places)].module}"

    def begin(self) -> None:
        """Waits for each module of the edits; those that have been imported are edited at once."""
        for module in dict.fromkeys(edit.module for edit in self._edits):
            after_import(module, lambda module=module: self._edit(module))  # type: ignore[misc]

    def undo(self) -> None:
        """Puts the library's own code back."""
        for one in self._undoing:
            one()

    def record(self, writer: TraceWriter) -> None:
        """Writes what is in place and what it has done so far, or why it is not in place."""
        effect = f"; they changed something in {self.acted} of {self.hits} calls" if self.hits else ""
        record = Correction(
            n=writer.next_n(),
            id=self.name,
            target=", ".join(f"{edit.module}.{edit.function}" for edit in self._edits),
            installed=self.installed,
            reason=self.reason,
            proof=f"corrected lines run at {', '.join(self.places)}{effect}" if self.installed else "",
            hits=self.hits,
        )
        writer.write(record)

    def _count(self, acts: bool) -> None:
        self.hits += 1
        self.acted += acts

    def _edit(self, name: str) -> None:
        if self.error is not None:
            return
        module = sys.modules[name]
        self.release = release_of(self.library, Path(module.__file__ or ""))
        for edit in self._edits:
            if edit.module != name:
                continue
            try:
                place, undo = install(edit, module, self._hit)
            except TargetMismatchError as error:
                self.error = error
                self.undo()
                self.places.clear()
                break
            self.places.append(place)
            self._undoing.append(undo)
        if self.error is not None or self.installed:
            self._changed(self)


def serve(asked: str) -> None:
    """Runs a script with corrections.

    Args:
        asked: JSON with ``script`` (``path``, ``module``, ``code`` and ``args`` as in a scenario) and ``corrections``, each with
            its ``id``, and with ``library`` and ``edits`` if it edits one.

    Raises:
        SystemExit: there is no such script, or a library is not the one that a correction was written for; status 2.
    """
    request = from_json(asked.encode())
    for one in request["corrections"]:
        if one["edits"]:
            edits = [Edit(**edit | {"parameters": tuple(edit["parameters"])}) for edit in one["edits"]]
            edited = EditedLibrary(
                one["id"], one["library"], edits, counted=False, changed=partial(_answer, one["seen"])
            )
            edited.begin()
            atexit.register(_tell_if_unused, edited)
        else:
            after_import("torch", lambda name=one["id"]: _ModelCorrection(name).begin())  # type: ignore[misc]
    script = request["script"]
    try:
        program = main_module.program(script["path"], script["module"], script["code"])
    except main_module.NotRunnableError as error:
        _refuse(str(error))
    with noticing(_leaving):
        main_module.run(program, script["args"])


def _leaving(error: BaseException) -> None:
    """The script's traceback begins with the script, as without this package."""
    hide_own_frames(error)
    hide_in_excepthook()


def _answer(seen: Sequence[str], edited: EditedLibrary) -> None:
    """Says what has become of a correction when its library is imported; one that cannot be made ends the script."""
    release = f"{edited.library} {edited.release}".strip()
    if edited.installed:
        untried = "" if edited.release in seen else f"; it was tried on {', '.join(seen)}, not on this release"
        _say(f"{edited.name} is in place: {release}, {', '.join(edited.places)}{untried}")
    elif edited.corrected_already:
        _say(f"{edited.name} is not needed any more: {release}, {edited.error}")
    else:
        _refuse(f"{edited.name} does not fit {release}: {edited.error}")


def _tell_if_unused(edited: EditedLibrary) -> None:
    if not edited.installed and edited.error is None:
        _say(f"{edited.name} was not used: the script has not imported {edited.library}")


class _ModelCorrection:
    """A correction that is put into a model: the first outermost module that it fits, when that is first called.

    The hook that waits for the module is taken away then, so later calls cost what they cost without it.

    Args:
        name: id of the correction.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._reason = "the script has not called any module"
        self._offered: set[int] = set()
        self._stop: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Waits for a module; torch is there."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._stop = register_module_forward_pre_hook(self._offer).remove
        atexit.register(self._tell_if_unused)

    def _offer(self, module: "nn.Module", inputs: Any) -> None:
        from dtypedoctor.corrections.contract import put_in

        if id(module) in self._offered:
            return
        self._offered.update(id(part) for part in module.modules())
        try:
            installed = put_in(self._name, module, [])
        except TargetMismatchError as error:
            self._reason = str(error)
            return
        self._stop()
        self._reason = ""
        _say(f"{self._name} is in place: {installed.proof}")

    def _tell_if_unused(self) -> None:
        if self._reason:
            _say(f"{self._name} was not used: {self._reason}")


def _say(text: str) -> None:
    print(f"dtypedoctor: {text}", file=sys.stderr, flush=True)


def _refuse(text: str) -> NoReturn:
    sys.stdout.flush()
    print(f"error: {text}", file=sys.stderr, flush=True)
    sys.exit(2)
