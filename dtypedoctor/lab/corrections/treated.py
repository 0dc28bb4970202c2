"""Puts corrections into the process of a script: into a library as soon as that is imported, or into the script's model.

``dtypedoctor treat`` runs a script, and the Python processes that it starts, with them and nothing else: no instruments, no trace, no count of
uses. What the script does beside that, its output and its exit status are its own. A script that is watched takes :class:`EditedLibrary`
from here. Nothing imports torch before the script does, so a correction is in place before its first line.
"""

import atexit
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

from dtypedoctor.plugins import Edit
from dtypedoctor.source_edits import AlreadyCorrectedError, Hit, TargetMismatchError, install, release_of
from dtypedoctor.unpatched import from_json, getpid, to_json
from dtypedoctor.worker.on_import import after_import

if TYPE_CHECKING:
    from torch import nn

    from dtypedoctor.trace.writer import TraceWriter


class EditedLibrary:
    """One correction that consists of edits.

    Args:
        name: id of the correction.
        library: the library of ``edits``, as it is imported.
        edits: what becomes of its source, in one module or in several of which a script may import some.
        counted: count the uses of the corrected lines; without it they cost nothing.
        changed: called when the edits of a module are in place, and when they cannot be.

    Attributes:
        places: ``file:line`` of each edit that is in place.
        added: how many of these are in the module that was imported last.
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
        self.added = 0
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
        """Whether the edits of every module that was imported are in place."""
        return bool(self.places) and self.error is None

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
        modules = ", ".join(dict.fromkeys(edit.module for edit in self._edits))
        return f"{TargetMismatchError.__name__}: the script has not imported {modules}"

    def begin(self) -> None:
        """Waits for each module of the edits; those that have been imported are edited at once."""
        for module in dict.fromkeys(edit.module for edit in self._edits):
            after_import(module, lambda module=module: self._edit(module))  # type: ignore[misc]

    def undo(self) -> None:
        """Puts the library's own code back."""
        for one in self._undoing:
            one()

    def record(self, writer: "TraceWriter") -> None:
        """Writes what is in place and what it has done so far, or why it is not in place."""
        from dtypedoctor.trace.events import Correction  # a treated script writes no trace

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
        edits = [edit for edit in self._edits if edit.module == name]
        self.added = len(edits)
        for edit in edits:
            try:
                place, undo = install(edit, module, self._hit)
            except TargetMismatchError as error:
                self.error = error
                self.undo()
                self.places.clear()
                break
            self.places.append(place)
            self._undoing.append(undo)
        self._changed(self)


INHERITED = "DTYPEDOCTOR_TREATED"
"""Environment variable with what the processes that a treated script starts are treated with, as JSON."""
_NAMED = 3
"""Programs that are named in one line."""
_PYTHONS = ("python", "pypy", "torchrun", "accelerate", "deepspeed")
"""How the names of programs begin that run Python programs."""


def follow() -> None:
    """Puts the corrections of a treated script into this process, the script's own or an interpreter of its environment that one of its has started."""
    from dtypedoctor.worker.recording import hide_in_excepthook

    family = from_json(os.environ[INHERITED].encode())
    if family["python"] != [sys.prefix, sys.version]:
        return
    treatment = _Treatment(family)
    treatment.begin()
    if family["root"] == getpid():
        atexit.register(treatment.conclude)
        hide_in_excepthook()


class _Treatment:
    """The corrections of a treated script in one of its processes.

    A fork has the corrected code of its parent. A new interpreter is reached through ``PYTHONPATH``. All write to one file what they have
    treated and what they start, so that the script's own process can say at its end which were not reached.

    Args:
        family: what the processes of one script share: ``root`` (its process id), ``notes`` (that file), ``corrections``.
    """

    def __init__(self, family: Mapping[str, Any]) -> None:
        self._root: int = family["root"]
        self._notes = Path(family["notes"])
        self._corrections = family["corrections"]
        self._unused: dict[str, Callable[[], str]] = {}

    def begin(self) -> None:
        """Waits for the libraries and for the first model; nothing of the script has run."""
        for one in self._corrections:
            name = one["id"]
            if one["edits"]:
                edits = [Edit(**edit | {"parameters": tuple(edit["parameters"])}) for edit in one["edits"]]
                changed = partial(self._answer, one["seen"])
                edited = EditedLibrary(name, one["library"], edits, counted=False, changed=changed)
                edited.begin()
                self._unused[name] = partial(_why_unused, edited)
            else:
                model = _ModelCorrection(name, self._placed, partial(self._not_fitting, name))
                after_import("torch", model.begin)
                self._unused[name] = partial(getattr, model, "reason")
        self._note(treated=sys.orig_argv)
        after_import("subprocess", self._follow_subprocesses)

    def conclude(self) -> None:
        """The script's own process ends: says where corrections are, and which processes were not treated."""
        if getpid() != self._root:  # a fork that ends as a program does
            return
        notes = self._read_notes()
        for name, why in self._unused.items():
            others = {note["pid"] for note in notes if note.get("placed") == name} - {self._root}
            if others:
                _say(
                    f"{name} is in place in {len(others)} process{'es' if len(others) > 1 else ''} that the script started"
                )
            elif why():
                _say(f"{name} was not used: {'; '.join(_reasons_of(name, notes)) or why()}")
        missed = _not_treated(notes)
        if missed:
            more = f" and {len(missed) - _NAMED} more" if len(missed) > _NAMED else ""
            _say(
                f"not treated: {'; '.join(missed[:_NAMED])}{more}. A process is treated if it is this Python and takes PYTHONPATH "
                "from the script; else start it with dtypedoctor treat"
            )
        self._notes.unlink(missing_ok=True)

    def _answer(self, seen: Sequence[str], edited: EditedLibrary) -> None:
        """Says what has become of a correction when its library is imported; one that cannot be made ends the script."""
        release = f"{edited.library} {edited.release}".strip()
        if edited.installed:
            untried = "" if edited.release in seen else f"; it was tried on {', '.join(seen)}, not on this release"
            self._placed(edited.name, f"{release}, {', '.join(edited.places[-edited.added :])}{untried}")
        elif not edited.corrected_already:
            text = f"{edited.name} does not fit {release}: {edited.error}"
            sys.stdout.flush()
            print(f"error: {text}", file=sys.stderr, flush=True)
            sys.exit(2)
        elif getpid() == self._root:
            _say(f"{edited.name} is not needed any more: {release}, {edited.error}")

    def _placed(self, name: str, where: str) -> None:
        self._note(placed=name)
        if getpid() == self._root:
            _say(f"{name} is in place: {where}")

    def _not_fitting(self, name: str, why: str) -> None:
        """A model is not what a correction is for; another one may be."""
        self._note(not_fitting=name, why=why)

    def _follow_subprocesses(self) -> None:
        popen = sys.modules["subprocess"].Popen
        original = popen.__init__

        @wraps(original)
        def begin(process: object, args: Any, *rest: Any, **options: Any) -> None:
            # a command as text; an iterator, which can be read once, is left for the program
            named = args if isinstance(args, (list, tuple)) else [args]
            words = [os.fsdecode(word) for word in named if isinstance(word, (str, bytes, os.PathLike))]
            if words and os.path.basename(words[0]).startswith(_PYTHONS):
                self._note(started=words)
            original(process, args, *rest, **options)

        popen.__init__ = begin

    def _note(self, **what: object) -> None:
        """Adds a line to the file; one that ended before this process did is not made again."""
        with suppress(OSError):
            descriptor = os.open(self._notes, os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, f"{to_json({'pid': getpid(), **what})}\n".encode())
            finally:
                os.close(descriptor)

    def _read_notes(self) -> list[dict[str, Any]]:
        with suppress(OSError):
            return [from_json(line) for line in self._notes.read_bytes().splitlines()]
        return []


def _not_treated(notes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Commands of Python processes that were started and that have not written that they are treated."""
    reached = [note["treated"] for note in notes if "treated" in note]
    missed = []
    for started in (note["started"] for note in notes if "started" in note):
        words = started[1:]
        found = next((argv for argv in reached if argv[len(argv) - len(words) :] == words), None)
        if found is None:
            missed.append(shorten(shlex.join(started), 100, placeholder=" …"))
        else:
            reached.remove(found)
    return missed


def _reasons_of(name: str, notes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why a correction fits no model, in this process or in those that it has started; each reason once."""
    return list(dict.fromkeys(note["why"] for note in notes if note.get("not_fitting") == name))


def _why_unused(edited: EditedLibrary) -> str:
    """Why a correction is neither in place nor refused; empty where it is."""
    if edited.installed or edited.error is not None:
        return ""
    return f"the script has not imported {edited.library}"


class _ModelCorrection:
    """A correction that is put into a model: the first outermost module that it fits, when that is first called.

    The hook that waits for the module is taken away then, so later calls cost what they cost without it.

    Args:
        name: id of the correction.
        placed: called with the id and with what proves it, once it is in place.
        not_fitting: called with the reason for each model that it does not fit.

    Attributes:
        reason: why it is not in place; empty if it is.
    """

    def __init__(self, name: str, placed: Callable[[str, str], None], not_fitting: Callable[[str], None]) -> None:
        self.reason = "the script has not called any module"
        self._name = name
        self._placed = placed
        self._not_fitting = not_fitting
        self._offered: set[int] = set()
        self._stop: Callable[[], None] = lambda: None

    def begin(self) -> None:
        """Waits for a module; torch is there."""
        from torch.nn.modules.module import register_module_forward_pre_hook

        self._stop = register_module_forward_pre_hook(self._offer).remove

    def _offer(self, module: "nn.Module", inputs: Any) -> None:
        from dtypedoctor.corrections.contract import put_in

        if id(module) in self._offered:
            return
        self._offered.update(id(part) for part in module.modules())
        try:
            installed = put_in(self._name, module, [])
        except TargetMismatchError as error:
            if self.reason != str(error):
                self.reason = str(error)
                self._not_fitting(self.reason)
            return
        self._stop()
        self.reason = ""
        self._placed(self._name, installed.proof)


def _say(text: str) -> None:
    print(f"dtypedoctor: {text}", file=sys.stderr, flush=True)
