"""Puts a question to the reducer: which of these candidates must be treated for the run to be healthy?

The candidates are the modules of a model (blocks, their submodules, and each module's own arithmetic) or corrections.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import log2
from typing import TYPE_CHECKING

from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.dtypes import DTYPES
from dtypedoctor.examination.fixes import remedies
from dtypedoctor.lab.bisect.measurements import ReferenceSetup
from dtypedoctor.lab.bisect.probes import Layers, probe_of
from dtypedoctor.lab.bisect.results import OWN, Answer, Symptom
from dtypedoctor.lab.scenarios.model import Scenario
from dtypedoctor.lab.trials.changes import change_of
from dtypedoctor.lab.trials.reduction import BaselineError, Interrupted, Node, Options, Outcome, Probe, cover, reduce
from dtypedoctor.trace.model import Trace

if TYPE_CHECKING:
    from dtypedoctor.lab.bisect.measurements import ProbeRunner

ORIGIN_WEIGHT = 32.0
"""Weight of the module that a trace blames, where 1 is a module that uses its dtype's whole range."""

_LEAST = 0.02
"""Weight of a leaf that nothing points to."""

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
    # opens the nodes that hold most of the leaves, until none does
    total = len(tree.leaves())
    roots = [tree]
    while (
        large := next((node for node in roots if node.children and 2 * len(node.leaves()) > total), None)
    ) is not None:
        position = roots.index(large)
        roots[position : position + 1] = large.children
    return Forest(tree=tree, roots=tuple(roots))


def called_modules(failing: Sequence[Trace], reference: Trace) -> set[str]:
    """Dotted names of the modules that are called where it fails.

    A failing run may end early; what it has not come to is taken from the reference. The reference, however, computes with
    plain modules what others compute with fused kernels, so it adds nothing inside of modules like those that return in a
    failing run without calling any.
    """
    names = _modules_with(failing, "entered", "output")
    parents = {ancestor for name in names for ancestor in _ancestors(name)}
    alone = {_pattern(name) for name in _modules_with(failing, "output") - parents}
    more = {
        name
        for name in _modules_with([reference], "entered", "output")
        if not any(_pattern(ancestor) in alone for ancestor in _ancestors(name))
    }
    return names | more


def layers_in(trace: Trace) -> Layers | None:
    """The longest row of modules that were called and that only a number tells apart, as a decoder's layers are."""
    names = _modules_with([trace], "entered", "output")
    numbered = Counter(parent for parent, _, last in (name.rpartition(".") for name in names) if last.isdigit())
    return Layers(*numbered.most_common(1)[0]) if numbered else None


def _modules_with(traces: Sequence[Trace], *kinds: str) -> set[str]:
    """Dotted names of the modules of which there are sites of these kinds."""
    return {site.fqn for trace in traces for site in trace.sites.values() if site.kind in kinds}


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


def _ancestors(name: str) -> set[str]:
    """All dotted prefixes of ``name``, the empty one included, without itself."""
    parts = name.split(".") if name else []
    return {".".join(parts[:length]) for length in range(len(parts))}


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts ``layers.2`` before ``layers.10``."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def offered_corrections(scenario: Scenario, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Corrections that the findings propose and that the scenario names, in this order, each once.

    Remedies that change something else (a dtype, an autocast region) are no corrections and left out, and so are those that
    are there to raise.
    """
    return tuple(dict.fromkeys(_corrections(scenario, findings)))


def _corrections(scenario: Scenario, findings: Sequence[Finding]) -> Iterator[str]:
    present = {correction.id for correction in scenario.corrections}
    for name in _proposed(scenario, findings):
        remedy = remedies().get(name)
        if remedy is None or remedy.strict:
            continue
        changed = change_of(remedy)(scenario)
        if changed.with_changes(corrections=scenario.model_dump()["corrections"]) == scenario:
            yield from (correction.id for correction in changed.corrections if correction.id not in present)


def _proposed(scenario: Scenario, findings: Sequence[Finding]) -> Iterator[str]:
    """Ids of the remedies that the findings propose and that the scenario names."""
    for finding in findings:
        if finding.severity is not Severity.INFO:
            yield from finding.remedies
    yield from (*scenario.remedies, *scenario.expect.cured_by, *scenario.expect.not_cured_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A probe and what it came to.

    Attributes:
        question: which question it belongs to.
        names: what was treated, in the fewest words.
        symptom: what the run came to.
        repeated: it was known from before an interruption.
    """

    question: str
    probe: Probe
    names: tuple[str, ...]
    symptom: Symptom
    repeated: bool


Watch = Callable[[Measured], None]
"""Is told each probe as it ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A question for the reducer.

    Attributes:
        name: ``modules`` or ``corrections``.
        roots: the candidates.
        scenario: the run with exactly these leaves treated.
        names: what these leaves are called together.
        failure: the failure that is looked for.
    """

    name: str
    roots: tuple[Node, ...]
    scenario: Callable[[frozenset[str]], Scenario]
    names: Callable[[frozenset[str]], tuple[str, ...]]
    failure: Symptom


def ask(runner: "ProbeRunner", setup: ReferenceSetup, question: Question, watch: Watch) -> Answer:
    """Has sets of candidates run and judged until the reducer is done.

    Ctrl-C does not raise: the answer then holds the best that is known.
    """
    answer = Answer()
    latest: dict[frozenset[str], tuple[Symptom, bool]] = {}
    attempts: Counter[frozenset[str]] = Counter()

    def test(treated: frozenset[str]) -> Outcome:
        done = runner.ask(probe_of(question.scenario(treated)), attempt=attempts[treated])
        attempts[treated] += 1
        symptom = setup.judge(done.run)
        latest[treated] = symptom, done.repeated
        answer.symptoms.setdefault(treated, symptom)
        answer.seconds.append(symptom.seconds)
        return symptom.outcome(question.failure)

    def tell(probe: Probe) -> None:
        symptom, repeated = latest[probe.treated]
        names = question.names(probe.treated)
        watch(Measured(question=question.name, probe=probe, names=names, symptom=symptom, repeated=repeated))

    try:
        answer.result = reduce(test, question.roots, Options(repeat=1, on_probe=tell))
    except BaselineError as error:
        answer.baseline = error
    except Interrupted as ended:  # by Ctrl-C, or because no more runs can be made, usually because the disk is full
        answer.interrupted = True
        answer.best = ended.best
    return answer
