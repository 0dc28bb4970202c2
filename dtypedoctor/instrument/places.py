"""Where tensors are measured, described once, so that a sample is only numbers.

A :class:`Place` is a module, or something that no module returned. A site is all that describes a tensor there: phase, kind, dtype, shape,
autocast. A :class:`Recorder` measures and writes samples of sites; those there are stand in ``recorders.py``.
"""

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from dtypedoctor.instrument.naming import Names, short_name
from dtypedoctor.instrument.statistics import Named
from dtypedoctor.trace.events import Site

if TYPE_CHECKING:
    from dtypedoctor.trace.writer import TraceWriter


class Place:
    """Where tensors are measured: a module, or something that no module returned (a loss, a parameter).

    Attributes:
        root: number of the outermost module.
        fqn: dotted name.
        cls: class of the module; empty where there is none.
        sites: numbers of the sites described here so far; kept by ``Sites``.
        flows: combinations of dtypes seen so far; kept by the module watch.
        usual: what the last call of the module looked like; kept by what records outputs.
        usuals: the same of earlier calls, by the shape of what they returned; kept by the same.
        gradients: what the last gradient of each output looked like, by its path; kept by the same.
    """

    __slots__ = (
        "__weakref__",
        "cls",
        "flows",
        "fqn",
        "gradients",
        "root",
        "sites",
        "usual",
        "usuals",
    )

    def __init__(self, root: int, fqn: str, cls: str) -> None:
        self.root = root
        self.fqn = fqn
        self.cls = cls
        self.sites: dict[Any, int] = {}
        self.flows: set[Any] = set()
        self.usual: Any = None
        self.usuals: dict[Any, Any] = {}
        self.gradients: dict[str, Any] = {}


class Places:
    """Finds the place of a module.

    Modules are looked up by identity in a plain dictionary, which takes a tenth of the time of a weak one; a weak
    reference beside each entry tells whether the identity still belongs to the same module.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self.version = -1
        """The version of the names that the entries are of."""
        self.known: dict[int, tuple[Any, Place]] = {}
        """A weak reference to each module that has a place, and the place, by the module's identity."""
        self._unknown: dict[int, Any] = {}
        self.by_name: dict[tuple[int, str, str], Place] = {}
        """Each place by its root, dotted name and class."""

    def begin_call(self) -> None:
        """Another outermost call begins: modules that no root was known to hold are looked for again."""
        self._unknown.clear()

    def of(self, module: nn.Module) -> Place | None:
        """The place of ``module``; None for one that no root is known to hold."""
        if self.version != self._names.version:
            self._refresh()
        held = self.known.get(id(module))
        if held is not None and held[0]() is module:
            return held[1]
        unknown = self._unknown.get(id(module))
        if unknown is not None and unknown() is module:
            return None
        found = self._names.find(module)
        if self.version != self._names.version:
            self._refresh()
        place = self._place(*found, type(module).__name__) if found is not None else None
        if place is None:
            self._unknown[id(module)] = ref(module)
        else:
            self.known[id(module)] = (ref(module), place)
        return place

    def inside(self, stack: Sequence[nn.Module]) -> Place:
        """The place of the innermost call of ``stack``, a module that no other holds."""
        return self._place(*(self._names.of_call(stack) or (0, "")), type(stack[-1]).__name__)

    def named(self, root: int, fqn: str) -> Place:
        """The place of something that no module returned."""
        return self._place(root, fqn, "")

    def _refresh(self) -> None:
        self.known.clear()
        self._unknown.clear()
        self.version = self._names.version

    def _place(self, root: int, fqn: str, cls: str) -> Place:
        key = (root, fqn, cls)
        found = self.by_name.get(key)
        if found is None:
            found = self.by_name[key] = Place(root, fqn, cls)
        return found


MAX_SHAPES = 4
"""Shapes that a place is described with before its shape is given as varying; keeps the trace of a long run bounded."""


class Looks(NamedTuple):
    """All of a site that does not depend on the module: what its number is found by. Equal to the plain tuple."""

    phase: str
    kind: str
    path: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    autocast: str | None
    device: torch.device


class Sites:
    """Numbers places (module, phase, kind, path in a structure, dtype, shape, autocast)."""

    def __init__(self, writer: "TraceWriter") -> None:
        self._writer = writer
        self._numbers = count(1)
        self._described: dict[int, tuple[str, str]] = {}
        self.dtypes: dict[int, torch.dtype] = {}
        """The dtype of each site."""

    def kind_and_fqn(self, number: int) -> tuple[str, str]:
        """The kind of the site with this number, and the dotted name of what lies there."""
        return self._described[number]

    def id_of(self, place: Place, looks: Looks) -> int:
        """The number of the site, which is written to the trace when it is new."""
        return place.sites.get(looks) or self._describe(place, looks)

    def entry(self, place: Place, phase: str) -> int:
        """The number that stands for entering a module, for the cursor."""
        found = place.sites.get(phase)
        if found is None:
            found = next(self._numbers)
            self._writer.write(
                Site(id=found, root=place.root, fqn=place.fqn, cls=place.cls, phase=phase, kind="entered", index="",
                     dtype="", shape=[])
            )  # fmt: skip
            place.sites[phase] = found
        return found

    def _describe(self, place: Place, looks: Looks) -> int:
        family = looks._replace(shape=())
        counted = ("shapes", family)
        shapes = place.sites.get(counted, 0)
        if shapes < MAX_SHAPES:
            place.sites[counted] = shapes + 1
            return self._write(place, looks, looks, list(looks.shape))
        varying = ("varies", family)
        return place.sites.get(varying) or self._write(place, varying, looks, [-1] * len(looks.shape))

    def _write(self, place: Place, key: object, looks: Looks, shape: list[int]) -> int:
        found = next(self._numbers)
        self._writer.write(
            Site(id=found, root=place.root, fqn=place.fqn, cls=place.cls, phase=looks.phase, kind=looks.kind,
                 index=looks.path, dtype=short_name(looks.dtype), shape=shape,
                 device=looks.device.type, autocast=looks.autocast)
        )  # fmt: skip
        self._described[found] = (looks.kind, place.fqn)
        self.dtypes[found] = looks.dtype
        place.sites[key] = found  # not before: an interruption would leave a number that is described nowhere
        return found


Rows = Sequence[tuple[int, Tensor]]
"""Tensors to be measured, each with the number of its site."""


class When(NamedTuple):
    """Coordinates of samples.

    Attributes:
        n: sequence number of the first of them; those of the others follow.
    """

    n: int
    step: int
    call: int


class Source(NamedTuple):
    """The call of a module that tensors went into. Their sites are described only where they are needed."""

    place: Place
    phase: str
    autocast: str | None

    def looks(self, path: str, tensor: Tensor) -> Looks:
        """How one of the tensors looks as a sample."""
        return Looks(self.phase, "input", path, tensor.dtype, tensor.shape, self.autocast, tensor.device)


class Recorder(Protocol):
    """Measures what it is given on one device."""

    def record(
        self, rows: Rows, when: tuple[int, int, int], source: Source | None = None, given: Sequence[Named] = ()
    ) -> None:
        """Measures ``rows`` and, only if one of them is not finite, also what was ``given`` to ``source``.

        Args:
            rows: what is measured.
            when: the same as :class:`When`, which takes a third of a microsecond to make.
            source: the call that has returned ``rows``.
            given: what went into it.
        """

    def record_one(
        self, site: int, tensor: Tensor, step: int, call: int, source: Source | None = None, given: Sequence[Named] = ()
    ) -> int:
        """Measures one tensor where no mode of torch's is on: what nearly all calls and gradients need.

        Args:
            site: number of its site.
            tensor: a plain dense tensor on this recorder's device, which has been measured at this site before.
            step, call: coordinates of the sample.
            source: the module call that has returned it.
            given: what went into that call: plain dense tensors on the same device.

        Returns:
            The number of the sample.
        """

    def begin_call(self) -> None:
        """An outermost module call begins."""

    def end_call(self) -> None:
        """An outermost module call has ended: sends off what has been put together so far. Never waits."""

    def flush(self) -> None:
        """A pass has ended: sends off what has been put together and writes down what is known. Never waits."""

    def finish(self) -> None:
        """The run is over: everything measured gets into the trace as far as it can still be had. Never raises."""
