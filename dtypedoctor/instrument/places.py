"""What the watch keeps for each module, so that a call costs a few dictionary lookups."""

from collections.abc import Sequence
from typing import Any
from weakref import ref

from torch import nn

from dtypedoctor.instrument.naming import Names
from dtypedoctor.instrument.residual import residual_blocks


class Place:
    """Where tensors are measured: a module, or something that no module returned (a loss, a parameter).

    Attributes:
        root: number of the outermost module.
        fqn: dotted name.
        cls: class of the module; empty where there is none.
        sites: numbers of the sites described here so far; kept by ``Sites``.
        flows: combinations of dtypes seen so far; kept by the module watch.
        residual: whether what it returns is the residual stream.
        usual: what the last call of the module looked like; kept by what records outputs.
        gradients: what the last gradient of each output looked like, by its path; kept by the same.
    """

    __slots__ = ("__weakref__", "cls", "flows", "fqn", "gradients", "residual", "root", "sites", "usual")

    def __init__(self, root: int, fqn: str, cls: str) -> None:
        self.root = root
        self.fqn = fqn
        self.cls = cls
        self.sites: dict[Any, int] = {}
        self.flows: set[Any] = set()
        self.residual = False
        self.usual: Any = None
        self.gradients: dict[str, Any] = {}


class Places:
    """Finds the place of a module.

    Modules are looked up by identity in a plain dictionary, which takes a tenth of the time of a weak one; a weak
    reference beside each entry tells whether the identity still belongs to the same module.
    """

    def __init__(self, names: Names) -> None:
        self._names = names
        self._version = -1
        self._of: dict[int, tuple[Any, Place | None]] = {}
        self._unknown: list[int] = []
        self._by_name: dict[tuple[int, str, str], Place] = {}
        self._residual: set[int] = set()

    def begin_call(self) -> None:
        """Another outermost call begins: modules that no root was known to hold are looked for again."""
        for identity in self._unknown:
            self._of.pop(identity, None)
        self._unknown.clear()

    def of(self, module: nn.Module) -> Place | None:
        """The place of ``module``; None for one that no root is known to hold."""
        if self._version != self._names.version:
            self._refresh()
        held = self._of.get(id(module))
        if held is not None and held[0]() is module:
            return held[1]
        return self._learn(module)

    def inside(self, stack: Sequence[nn.Module]) -> Place:
        """The place of the innermost call of ``stack``, a module that no other holds: it is named after its class and its caller."""
        cls = type(stack[-1]).__name__
        held = next((place for module in reversed(stack[:-1]) if (place := self.of(module)) is not None), None)
        if held is None:
            return self._place(0, f"{cls}()", cls)
        return self._place(held.root, f"{held.fqn}.{cls}()" if held.fqn else f"{cls}()", cls)

    def named(self, root: int, fqn: str) -> Place:
        """The place of something that no module returned."""
        return self._place(root, fqn, "")

    def _refresh(self) -> None:
        self._of.clear()
        self._version = self._names.version
        self._residual = {block for root in self._names.roots for block in residual_blocks(root)}

    def _learn(self, module: nn.Module) -> Place | None:
        found = self._names.find(module)
        if self._version != self._names.version:
            self._refresh()
        place = self._place(*found, type(module).__name__) if found is not None else None
        if place is None:
            self._unknown.append(id(module))
        else:
            place.residual = id(module) in self._residual
        self._of[id(module)] = (ref(module), place)
        return place

    def _place(self, root: int, fqn: str, cls: str) -> Place:
        key = (root, fqn, cls)
        found = self._by_name.get(key)
        if found is None:
            found = self._by_name[key] = Place(root, fqn, cls)
        return found
