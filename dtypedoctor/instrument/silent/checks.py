"""All observers of one process. Those of dtypedoctor are found by being in this package, others by their entry points; each has a priority."""

import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from importlib import import_module
from typing import Any, TypeVar

from dtypedoctor.instrument import silent
from dtypedoctor.instrument.float32_program import Originals
from dtypedoctor.instrument.session import Session
from dtypedoctor.instrument.silent.look import RoutineLook
from dtypedoctor.instrument.silent.observer import Observer
from dtypedoctor.instrument.whereabouts import Whereabouts
from dtypedoctor.plugins import Check, left_out, registered, resolve

Of = TypeVar("Of", bound=Observer)


class Checks:
    """Makes each observer once, and says which of them hear of a moment.

    Args:
        session: where the observations go.
        originals: what half-precision tensors were before they were cast; shared with the op trace.
        look_steps: up to which training step the operators of some calls are looked at, and tokens decoded again; None: in all.

    Attributes:
        whereabouts: says where the operator that is running stands.
        in_scaler: says whether a gradient scaler is at work.
    """

    def __init__(self, session: Session, originals: Originals, *, look_steps: int | None = None) -> None:
        self.session, self.originals = session, originals
        self.look_steps = float("inf") if look_steps is None else look_steps
        self.whereabouts = Whereabouts(session)
        self.in_scaler: Callable[[], bool] = lambda: False
        self._is_on = False
        self._told_of: set[tuple[Observer, str]] = set()
        self._made: dict[type[Observer], Observer] = {}
        self._of_plugins: dict[type[Observer], str] = {}
        for cls in own_observers():
            self._make(cls)
        for name, check in registered(Check).items():
            with session.guard.keeping(f"the check {name}"):
                cls = resolve(check.observe)
                if not (isinstance(cls, type) and issubclass(cls, Observer)):
                    raise TypeError(f"{check.observe} is no subclass of Observer")
                self._of_plugins[cls] = name
                self._make(cls)
        for plugin in left_out():
            if plugin.what.startswith("dtypedoctor.checks "):
                session.guard.tell(plugin.what, plugin.why)
        self.look = RoutineLook(self.hearing("saw"), self.hearing("look_ended"), session, steps=self.look_steps)

    def __getitem__(self, cls: type[Of]) -> Of:
        """The observer of this class."""
        observer = self._made.get(cls) or self._make(cls)
        assert isinstance(observer, cls)
        return observer

    def _make(self, cls: type[Observer]) -> Observer:
        if cls not in self._made:
            self._made[cls] = cls(self)
        return self._made[cls]

    def _hearing(self, moment: str) -> list[Observer]:
        """Those that have a method of their own for a moment, in the order in which they are called."""
        ordered = sorted(self._made.values(), key=lambda observer: (observer.priority, type(observer).__name__))
        return [observer for observer in ordered if getattr(type(observer), moment) is not getattr(Observer, moment)]

    def _method(self, observer: Observer, moment: str) -> Callable[..., Any]:
        """A method of an observer; what that of a plug-in raises is kept from the program and from other observers."""
        method: Callable[..., Any] = getattr(observer, moment)
        name = self._of_plugins.get(type(observer))
        if name is None:
            return method
        keeping = self.session.guard.keeping(f"the check {name}")

        def kept_apart(*args: Any) -> Any:
            with keeping:
                return method(*args)

        return kept_apart

    def hearing(self, moment: str, *, between_looks: bool = False) -> list[Callable[..., Any]]:
        """What is called at a moment, in this order; with ``between_looks`` what is called in each step."""
        return [
            self._method(observer, moment)
            for observer in self._hearing(moment)
            if observer.between_looks or not between_looks
        ]

    def start(self) -> None:
        """The program begins."""
        self._is_on = True
        for start in self.hearing("start"):
            start()
        self.follow_imports(lambda module, listener: listener() if module in sys.modules else None)

    def stop(self) -> None:
        """The program has ended."""
        self._is_on = False
        self.look.after_call()
        for stop in self.hearing("stop"):
            stop()
        for observer in self._made.values():
            observer.put_back()

    def follow_imports(self, after_import: Callable[[str, Callable[[], None]], Any]) -> list[Any]:
        """Has observers told of the modules that they wait for; ``after_import`` calls a function once a module is there."""
        waiting = [(observer, module) for observer in self._hearing("imported") for module in observer.waits_for]
        return [after_import(module, partial(self._imported, observer, module)) for observer, module in waiting]

    def _imported(self, observer: Observer, module: str) -> None:
        if self._is_on and (observer, module) not in self._told_of:
            self._told_of.add((observer, module))
            self._method(observer, "imported")(module)

    def following(self, func: Any) -> list[Callable[..., Any]]:
        """Who is called with each call of an operator outside of modules."""
        heard = self._hearing("ran")
        return [self._method(observer, "ran") for observer in heard if self._method(observer, "follows")(func)]


@cache
def own_observers() -> Sequence[type[Observer]]:
    """The classes of dtypedoctor's own observers."""
    return tuple(_own_observers())


def _own_observers() -> Iterator[type[Observer]]:
    for info in pkgutil.iter_modules(silent.__path__, f"{silent.__name__}."):
        module = import_module(info.name)
        for value in list(vars(module).values()):
            is_observer = isinstance(value, type) and issubclass(value, Observer) and value is not Observer
            if is_observer and value.__module__ == info.name:
                yield value
