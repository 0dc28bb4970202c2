"""The modules of a model as candidates: blocks, their submodules, and each module's own arithmetic."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2

from dtypedoctor.dtypes import DTYPES
from dtypedoctor.trace.reader import Trace
from dtypedoctor.trials.bisection.symptoms import OWN
from dtypedoctor.trials.candidates import Node, cover

__all__ = ["Forest", "plant"]

ORIGIN_WEIGHT = 32.0
"""Weight of the module that a trace blames, where 1 is a module that uses its dtype's whole range."""

_WRAPPED = ".base_layer"
"""What a tuner such as LoRA calls the layer that it wraps; the two are one candidate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forest:
    """The candidates.

    Attributes:
        tree: all of them under one root, the model.
        roots: where the search begins: the blocks, and what lies beside them.
    """

    tree: Node
    roots: tuple[Node, ...]

    def names(self, treated: frozenset[str]) -> tuple[str, ...]:
        """The fewest names for ``keep-float32`` that mean exactly the treated leaves."""
        return cover((self.tree,), treated)

    @property
    def leaves(self) -> tuple[str, ...]:
        """The names of all leaves."""
        return tuple(leaf.id for leaf in self.tree.leaves())


def plant(called: Iterable[str], weights: Mapping[str, float]) -> Forest:
    """Makes candidates of the modules that were called.

    Args:
        called: dotted names in any order; the empty one is the model itself. A module that is called only through a tuner
            which wraps it, and what the tuner adds, are left to the tuner.
        weights: how suspicious a leaf is, see :func:`suspicion`; leaves without a weight are as unlikely as can be.
    """
    names = set(called) | {""}
    wrappers = {name.removesuffix(_WRAPPED) for name in names if name.endswith(_WRAPPED)}
    names = {name for name in names if not _ancestors(name) & wrappers}
    children: dict[str, list[str]] = {name: [] for name in names}
    for name in sorted(names - {""}, key=_natural):
        children[max(_ancestors(name) & names, key=len)].append(name)
    tree = _node("", children, weights)
    return Forest(tree=tree, roots=_blocks(tree))


def called_modules(failing: Sequence[Trace], reference: Trace) -> set[str]:
    """Dotted names of the modules that are called where it fails.

    A failing run may end early; what it has not come to is taken from the reference. The reference, however, computes with
    plain modules what others compute with fused kernels, so it adds nothing inside of modules like those that return in a
    failing run without calling any.
    """
    names = {site.fqn for trace in failing for site in trace.sites.values() if site.kind in ("entered", "output")}
    parents = {ancestor for name in names for ancestor in _ancestors(name)}
    returned = {site.fqn for trace in failing for site in trace.sites.values() if site.kind == "output"}
    alone = {_pattern(name) for name in returned - parents}
    for site in reference.sites.values():
        if site.kind in ("entered", "output") and not {_pattern(name) for name in _ancestors(site.fqn)} & alone:
            names.add(site.fqn)
    return names


def _pattern(name: str) -> str:
    """The name that a module shares with those in its place in other layers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def suspicion(trace: Trace, blamed: str | None) -> dict[str, float]:
    """How suspicious each module is by its magnitudes, from 1 (at the end of its dtype's range) down.

    Args:
        trace: of the failing run.
        blamed: the module, or own arithmetic, that the trace blames.
    """
    weights: dict[str, float] = {}
    for sample in trace.samples:
        site = trace.sites.get(sample.site)
        if site is None or site.dtype not in DTYPES or DTYPES[site.dtype].bits > 16:
            continue
        octaves = log2(DTYPES[site.dtype].max / sample.absmax) if sample.absmax > 0 else 40.0
        weight = 1.0 / (1.0 + max(0.0, octaves))
        around = site.fqn.rpartition(".")[0] + OWN  # what a module gets was computed by its caller
        for name in (site.fqn, site.fqn + OWN) if site.kind == "output" else (around,):
            weights[name] = max(weight, weights.get(name, 0.0))
    if blamed is not None:
        weights[blamed] = ORIGIN_WEIGHT
    return weights


def _node(name: str, children: Mapping[str, Sequence[str]], weights: Mapping[str, float]) -> Node:
    if not children[name]:
        # a blamed module without children has no arithmetic but its own
        weight = max(weights.get(name, _LEAST), weights.get(name + OWN, _LEAST))
        return Node(id=name, weight=weight)
    own = Node(id=name + OWN, weight=weights.get(name + OWN, _LEAST))
    return Node(id=name, children=(own, *(_node(child, children, weights) for child in children[name])))


_LEAST = 0.02


def _blocks(tree: Node) -> tuple[Node, ...]:
    """Opens the nodes that hold most of the leaves, until none does."""
    total = len(tree.leaves())
    roots = [tree]
    while (
        large := next((node for node in roots if node.children and 2 * len(node.leaves()) > total), None)
    ) is not None:
        position = roots.index(large)
        roots[position : position + 1] = large.children
    return tuple(roots)


def _ancestors(name: str) -> set[str]:
    """All dotted prefixes of ``name``, the empty one included, without itself."""
    parts = name.split(".") if name else []
    return {".".join(parts[:length]) for length in range(len(parts))}


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts ``layers.2`` before ``layers.10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]
