"""Describes each measuring place once, so that a sample is only numbers."""

from itertools import count
from typing import NamedTuple

import torch
from torch import Tensor

from dtypedoctor.instrument.places import Place
from dtypedoctor.trace.events import Site
from dtypedoctor.trace.writer import TraceWriter

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


def looks_of(tensor: Tensor, phase: str, kind: str) -> Looks:
    """How ``tensor`` looks as a sample of some kind that no module returned."""
    return Looks(phase, kind, "", tensor.dtype, tensor.shape, None, tensor.device)


class Sites:
    """Numbers places (module, phase, kind, path in a structure, dtype, shape, autocast)."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer
        self._numbers = count(1)

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
                 index=looks.path, dtype=str(looks.dtype).removeprefix("torch."), shape=shape,
                 device=looks.device.type, autocast=looks.autocast)
        )  # fmt: skip
        place.sites[key] = found  # not before: an interruption would leave a number that is described nowhere
        return found
