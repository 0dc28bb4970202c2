"""The trace that a process leaves of itself, the same for ``run``, ``exec``, ``watch()`` and the callback of trainers.

A :class:`Recording` writes the first record and the last. What is measured between them is the business of a :class:`Watch`,
which comes when torch is there. Nothing heavy is imported here: a script may never come to torch. What ends the program is shown to its
user without the frames of this package.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol

from dtypedoctor.interruptions import contained
from dtypedoctor.lasting import at_fork, audited
from dtypedoctor.trace.events import Became, End, NotWatched, Refused, Resources, Stage
from dtypedoctor.trace.ranks import header
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.unpatched import getpid, perf_counter
from dtypedoctor.worker.elsewhere import Elsewhere
from dtypedoctor.worker.on_import import keep_out_of_compiler


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What a watch sums up at the end.

    Attributes:
        steps: optimizer steps, or whatever a workload counts as its steps.
        device: type or name of the device; empty where what the run took is not known.
        peak_memory: bytes over what was in use at the beginning.
        checksum: digest of what was trained; None where nobody has asked for it.
    """

    steps: int
    device: str = ""
    peak_memory: int = 0
    checksum: str | None = None


class Watch(Protocol):
    """What measures, from the moment at which torch is there."""

    def finish(self, error: BaseException | None, libraries: Sequence[str]) -> Totals:
        """Stops measuring, and writes what only the end knows.

        Args:
            error: what ended the run, if anything did; SystemExit is how a program leaves with a status.
            libraries: names of the C libraries that the program has loaded by ctypes.
        """
        raise NotImplementedError


class Recording:
    """The trace of this process, until :meth:`end` or :meth:`refuse`.

    Args:
        directory: where it lies; exists already.
        watched: False where no more than losses, steps and what ended the process are recorded.

    Attributes:
        writer: where the records go.
        watch: what measures; None until torch is there.
    """

    def __init__(self, directory: Path, *, watched: bool = True) -> None:
        self.writer = TraceWriter(directory)
        self.watch: Watch | None = None
        self._elsewhere: Elsewhere | None = None
        self._owner = getpid()
        self._began = perf_counter()
        self._over = False
        self.writer.write(header(watched=watched))

    @property
    def active(self) -> bool:
        """Whether it goes on, in this process: a forked child has a copy that does nothing."""
        return not self._over and getpid() == self._owner

    @property
    def seconds(self) -> float:
        """Time since it began."""
        return perf_counter() - self._began

    def follow_program(self, name: str) -> None:
        """This process runs a program that is not the doctor's, so it is also noted where else that is at work.

        Args:
            name: of the one stage that the trace has.
        """
        self.writer.write(Stage(n=self.writer.next_n(), index=0, name=name, workload="script"))
        at_fork(after_in_child=self.writer.disown)
        self._elsewhere = Elsewhere(lambda program: self.writer.write(Became(program=program)))
        self._elsewhere.begin()

    def torch_is_there(self, watch: Watch) -> None:
        """The program has imported torch, and ``watch`` is about to begin."""
        self.watch = watch
        keep_out_of_compiler(audited)

    def refuse(self, message: str, hint: str = "") -> None:
        """What was asked for cannot be run; nothing that a watch knows is written."""
        self.writer.write(Refused(message=message, hint=hint))
        self._close("refused", 0)

    def end(self, error: BaseException | None, unwatched: Iterable[tuple[str, str]] = ()) -> None:
        """What is recorded has come to its end; does nothing where that is known already, and in a forked child.

        Args:
            error: what ended it, if anything did. A scenario fails by SystemExit as by anything else; a program may leave so.
            unwatched: what was not watched, and why.
        """
        if not self.active:
            return
        self._over = True
        is_program = self._elsewhere is not None
        if error is not None and is_program:
            hide_own_frames(error)
        steps = 0
        with contained() as ours:  # a defect of ours, or a device that no longer answers
            steps = self._conclude(error, unwatched)
        if ours.error is not None:
            self._not_watched("the end of the program", f"{type(ours.error).__name__}: {ours.error}")
        completed = error is None or (is_program and isinstance(error, SystemExit))
        self._close("completed" if completed else "raised", steps)

    def _conclude(self, error: BaseException | None, unwatched: Iterable[tuple[str, str]]) -> int:
        """Writes what only the end knows; steps that were done."""
        libraries: Sequence[str] = ()
        if self._elsewhere is not None:
            self._elsewhere.end()
            libraries = self._elsewhere.libraries
            for what, why in (*self._elsewhere.processes(), *unwatched):
                self._not_watched(what, why)
        if self.watch is None:
            return 0
        totals = self.watch.finish(error, libraries)
        if totals.device:
            self.writer.write(
                Resources(
                    seconds=self.seconds,
                    peak_memory=totals.peak_memory,
                    device=totals.device,
                    checksum=totals.checksum,
                )
            )
        return totals.steps

    def _not_watched(self, what: str, why: str) -> None:
        self.writer.write(NotWatched(what=what, why=why))

    def _close(self, outcome: str, steps: int) -> None:
        self._over = True
        self.writer.write(End(n=self.writer.next_n(), outcome=outcome, steps_completed=steps))
        self.writer.close()


HOME = str(Path(__file__).resolve().parents[1])


def hide_own_frames(error: BaseException) -> None:
    """Removes this package's frames, and torch's that are there because of it, from the traceback of ``error`` and of the exceptions
    that it came from."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _foreign(one.__traceback__)
        waiting += [one.__cause__, one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions


def hide_in_excepthook() -> Callable[[], None]:
    """Lets whatever ``sys.excepthook`` is now see exceptions without this package's frames; nothing else of them is changed.

    Returns:
        What puts the hook back, unless somebody has set another one since.
    """
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        hide_own_frames(error)
        shown(kind, error, error.__traceback__)

    def put_back() -> None:
        if sys.excepthook is hook:
            sys.excepthook = shown

    sys.excepthook = hook
    return put_back


def _foreign(traceback: TracebackType | None) -> TracebackType | None:
    """A traceback without this package's frames, and without those of torch that are there because of it.

    Around an operator these are the wrapper that keeps the compiler out of a dispatch mode, and the operator that the mode calls; around a
    module the function in which torch calls hooks, if there are no others than the watch's.
    """
    kept: list[TracebackType] = []
    behind_own = False
    while traceback is not None:
        code = traceback.tb_frame.f_code
        if code.co_filename.startswith(HOME):
            while kept and _is(kept[-1], _UNCOMPILED):
                kept.pop()
            behind_own = True
        elif not (behind_own and _is(traceback, _OPERATOR)):
            behind_own = False
            if _is(traceback, _WITH_HOOKS) and kept and not _has_other_hooks(kept[-1]):
                kept[-1] = _without_hooks(kept[-1])
            else:
                kept.append(traceback)
        traceback = traceback.tb_next
    following = None
    for frame in reversed(kept):
        frame.tb_next = following
        following = frame
    return following


_UNCOMPILED = ("torch/_dynamo/eval_frame.py", "_fn")
_OPERATOR = ("torch/_ops.py", "__call__")
_WITH_HOOKS = ("torch/nn/modules/module.py", "inner")
_MODULES = "torch.nn.modules.module"
_TABLES = ("_backward_pre_hooks", "_backward_hooks", "_forward_pre_hooks", "_forward_hooks")


def _is(traceback: TracebackType, function: tuple[str, str]) -> bool:
    code = traceback.tb_frame.f_code
    return code.co_name == function[1] and code.co_filename.endswith(function[0])


def _has_other_hooks(calling: TracebackType) -> bool:
    """Whether torch would have called hooks of the program in this frame, which calls a module."""
    module, modules = calling.tb_frame.f_locals.get("self"), sys.modules.get(_MODULES)
    hooks = [hook for name in _TABLES for hook in getattr(modules, f"_global{name}", {}).values()]
    if not all(map(_is_own, hooks)):
        return True
    return any(getattr(module, name, None) for name in _TABLES)


def _is_own(hook: object) -> bool:
    code = getattr(hook, "__code__", None)
    return code is not None and code.co_filename.startswith(HOME)


def _without_hooks(calling: TracebackType) -> TracebackType:
    """The frame that calls a module as it is where there are no hooks: its first call with all arguments is that of ``forward``."""
    import dis  # not before torch has brought it in: a script sees which modules there are

    for instruction in dis.get_instructions(calling.tb_frame.f_code):
        if instruction.opname == "CALL_FUNCTION_EX" and instruction.positions is not None:
            line = instruction.positions.lineno or calling.tb_lineno
            return TracebackType(None, calling.tb_frame, instruction.offset, line)
    return calling
