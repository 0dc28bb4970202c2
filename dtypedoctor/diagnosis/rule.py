"""What is known of a failure before any run: a :class:`FindingSpec` for each finding id, and a :class:`Rule` that finds it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtypedoctor.diagnosis.checkpoint import Subject
    from dtypedoctor.trace.model import Trace


STAYS = "stays"
"""In the metadata of a dataclass's field: what it holds is for the user alone."""


class Severity(StrEnum):
    """How much a finding matters, the worst first."""

    ERROR = "error"
    WARNING = "warning"
    INFO = "info"


class Confidence(StrEnum):
    """How sure a finding is. ``PROVEN`` is said only where a counterfactual run or replay settled it."""

    PROVEN = "proven"
    LIKELY = "likely"
    POSSIBLE = "possible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One link of a provenance chain, from the failing op back to where a dtype originates."""

    fqn: str | None
    op: str
    dtype_in: str | None
    dtype_out: str | None
    source: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One diagnosed failure: what, where it originates, why, how sure, and what fixes it.

    Attributes:
        id: kebab-case id, the same string in YAML, JSON, docs and file names.
        fqn: dotted name of the module that originates the failure, or None where no module does.
        op: operator, e.g. ``aten.mul.Tensor``.
        phase: ``static``, ``forward``, ``backward``, ``recompute``, ``optimizer``, ``after the optimizer`` (behind its step, before anything else begins), ``generate`` or ``compile``.
        step: training step, counted from 1; where there is a ``call``, the same number.
        source: ``file.py:line`` of the user's or library's code.
        summary: the headline, one sentence.
        cause: why it happens, one paragraph.
        evidence: measurements, one sentence each.
        provenance: where the dtype that does not fit came from, from the failing op back.
        met: where the dtype that it met came from, from the other operand back to its origin.
        remedies: ids of remedies to try, best first.
        references: public tickets of the same failure.
        proven_by: the counterfactual that settled it, as a clause; None where the finding is not proven.
        rank: the process that it was seen on first; None where there is one process only.
        call: number of the outermost module call, only where the process made no optimizer step and it is not the first.
        consequence_of: id of the finding that this one is the surfacing of; None where it stands for itself.
        module: the module as a report names it, e.g. ``model[1] (Gated)``: the shortest end of its dotted name that no other module
            of the run has, and its class; empty before a report is made, and where ``fqn`` is None.
    """

    id: str
    severity: Severity
    confidence: Confidence
    fqn: str | None = None
    op: str | None = None
    phase: str | None = None
    step: int | None = None
    dtype: str | None = None
    source: str | None = None
    summary: str
    cause: str
    evidence: tuple[str, ...] = ()
    provenance: tuple[Link, ...] = ()
    remedies: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    rank: int | None = None
    consequence_of: str | None = None
    met: tuple[Link, ...] = ()
    call: int | None = None
    proven_by: str | None = None
    module: str = ""


def most_severe_first(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The findings by severity; those of one severity keep their order."""
    severities = list(Severity)
    return tuple(sorted(findings, key=lambda finding: severities.index(finding.severity)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One line of the program's own source, as it is and as it should be.

    Attributes:
        file: path, relative to the working directory where it is inside of it.
        line: number, from 1.
        old: the whole line, without its end.
        new: what stands in its place: a line, several, or nothing where the line goes.
    """

    file: str
    line: int
    old: str
    new: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to do about a finding.

    Attributes:
        finding: its id.
        text: what to change, in a sentence or two.
        edits: the change in the program's source, where it could be made; each ``old`` was in the file when the report was written.
        code: a line to add where the text says; empty where the edits are all, or nothing is to be added.
        maker: what has made the edits; empty where there are none.
        tried: on what the edits were tried: ``call``, ``step`` or ``run``; None where they were not, or there are none.
        others: other ways, each with its edits, the best first.
        waits: whether an edit was found that is not shown, and with which `exec --fix` may come further.
        of_a_part: the text where some of the edits are enough: without what is said of all together.
    """

    finding: str
    text: str
    edits: tuple[Edit, ...] = ()
    code: str = ""
    maker: str = ""
    tried: str | None = None
    others: "tuple[Advice, ...]" = ()
    waits: bool = field(default=False, metadata={STAYS: True})
    of_a_part: str = field(default="", metadata={STAYS: True})

    @property
    def is_shown(self) -> bool:
        """Whether it shows the change itself, and does not only describe it."""
        return bool(self.edits or self.code)


@dataclass(frozen=True, slots=True, kw_only=True)
class Excerpt:
    """A line of source at which a failure happened, or which led there; texts in it are masked.

    Attributes:
        file: path, relative to the working directory where it is inside of it; of a library from the top of its package on.
        line: number, from 1.
        function: in which the line stands; empty where that is not known.
        text: the line.
        begin, end: the columns (characters, from 0) of what was being done there; 0 and 0 where they are not known.
        skipped: how many frames lie between the excerpt before this one and this one.
        own: the line as it is, for the user's own terminal; it is written into no file, and redaction drops it.
    """

    file: str
    line: int
    function: str
    text: str
    begin: int = 0
    end: int = 0
    skipped: int = 0
    own: str = field(default="", metadata={STAYS: True})


Detector = Callable[["Trace"], Iterable[Finding]]
Inspector = Callable[["Subject"], Iterable[Finding]]
Comparer = Callable[[Sequence[Any]], Iterable[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Findings that stand together in tables.

    Attributes:
        id: kebab-case id.
        label: its name in running text.
        title: its heading in the index of findings.
        summary: one sentence below that heading.
    """

    id: str
    label: str
    title: str
    summary: str


DTYPE_MISMATCH = Family(
    id="dtype-mismatch",
    label="dtype mismatch",
    title="Dtype mismatch",
    summary="An operator raises, or would raise, because two dtypes meet.",
)
LOSS_SCALING = Family(
    id="loss-scaling",
    label="loss scaling",
    title="Loss scaling",
    summary="The gradient scaler raises, or cannot find a scale.",
)
NON_FINITE = Family(
    id="non-finite",
    label="non-finite",
    title="Non-finite values",
    summary="Where the first inf or NaN originates.",
)
SILENT = Family(
    id="silent",
    label="silent",
    title="Silent failures",
    summary="Nothing raises and everything is finite; the result is wrong.",
)
COMPILE_AND_LOAD = Family(
    id="compile-and-load",
    label="compile and load",
    title="Compiling and loading",
    summary="`torch.compile`, CUDA streams and checkpoints.",
)
FAMILIES = (DTYPE_MISMATCH, LOSS_SCALING, NON_FINITE, SILENT, COMPILE_AND_LOAD)
"""The built-in families in the order of the documentation's index."""

OF_ANY_FINDING = ("eager-attention", "compile-off")
"""Ablations that tell something about any finding of a run that has a fused attention kernel, or compiled code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindingSpec:
    """Everything about one finding id that does not depend on a run.

    Attributes:
        id: kebab-case id: the same string in YAML, ``report.json``, documentation and file names.
        title: one line for tables: what goes wrong.
        family: where it stands in tables.
        severity: how much it matters as a rule; a detector may say otherwise of a single case.
        aliases: other names under which a person may type it; reports use the ``id``.
        references: addresses of public tickets of the same failure, the most telling first.
        remedies: ids of the remedies to try, best first; empty where nothing can be switched on from outside.
        remedies_by_class: remedies written for one class of module, by the class's name; they come before ``remedies``.
        settled_by: remedies that change nothing but the cause which the finding names: one that fixes it proves the finding. Remedies that
            cast are not among them: they fix other things too.
        supported_by: remedies that take away more than that cause: what came of them is worth saying, and proves nothing.
        ablations: ablations that tell its causes apart, offered where a run has what they take away.
        fits_wider_dtype: its values may fit in a wider dtype: autocast is suspected only where a region has the finding's own dtype.
        needs: the ablation that takes away the cause it names: where the run fails without that too, the finding is cap_confidence.
        needs_only: that ablation takes away nothing besides, so that a run which passes under it proves the finding.
        in_float32_too: it claims that the dtype is not the cause: a run without autocast that fails in the same place proves it.
        nonfinite: it names the origin of an inf or NaN, so that magnitudes of the modules around it say something.
        do_this: what to change, as a sentence about ``{module}``, ``{op}``, ``{dtype}``, ``{other}`` (the dtype that it meets) ``{alike}`` (all
            modules of that class and dtype), ``{scores}`` (what else was measured to keep attention finite) and ``{device}``; where it is empty the first way of fixing on the page stands for it.
        of_line: the same of a finding that names a line; empty where ``do_this`` fits it too.
        instead: makes that sentence of a finding whose cause ``do_this`` and ``edits`` do not fit; it returns an empty one where they do.
        without_edit: makes it where no edit is seen; it returns an empty one where ``do_this`` fits.
        partly_frozen: the same, and a line of code to add, where some weights of that dtype are frozen: no edit may widen these.
        edits: what makes that change in the program's source, the best first; names of :data:`dtypedoctor.diagnosis.edits.MAKERS`.
        page: file with the page about it (Markdown); None for ``docs/findings/ID.md``.
        in_any_program: it can be found in any program; False where a program has to declare something first.
    """

    id: str
    title: str
    family: Family
    severity: Severity = Severity.ERROR
    aliases: tuple[str, ...] = ()
    references: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    remedies_by_class: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    settled_by: tuple[str, ...] = ()
    supported_by: tuple[str, ...] = ()
    ablations: tuple[str, ...] = OF_ANY_FINDING
    fits_wider_dtype: bool = False
    needs: str | None = None
    needs_only: bool = False
    in_float32_too: bool = False
    nonfinite: bool = False
    in_any_program: bool = True
    do_this: str = ""
    of_line: str = ""
    instead: Callable[[Finding], str] | None = None
    without_edit: Callable[[Finding], str] | None = None
    partly_frozen: tuple[str, str] | None = None
    edits: tuple[str, ...] = ()
    page: Path | None = None

    def remedies_for(self, cls: str = "") -> tuple[str, ...]:
        """Ids of the remedies for a failure that originates in a module of class ``cls``, the most specific first."""
        return (*self.remedies_by_class.get(cls, ()), *self.remedies)

    @property
    def proposed(self) -> tuple[str, ...]:
        """Ids of all remedies, whatever class of module they are for."""
        return (*(remedy for remedies in self.remedies_by_class.values() for remedy in remedies), *self.remedies)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What finds a failure, in the trace of a run or in a model that has not run, and what it can find.

    Attributes:
        name: kebab-case name.
        priority: of two findings of one severity, that of the rule with the smaller number comes first; of equal ones the name decides.
        specs: every finding that it may make.
        detect: reads a trace and gives its findings; None for a rule about models alone.
        inspect: reads what files, or a worker's notes, say of a model, and gives its findings; None for a rule about runs alone.
        compare: reads what the ranks of one job have left, and gives what only several of them show together; None for other rules.
    """

    name: str
    priority: int = 1000
    specs: tuple[FindingSpec, ...]
    detect: Detector | None = None
    inspect: Inspector | None = None
    compare: Comparer | None = None

    def __post_init__(self) -> None:
        """Raises TypeError where ``specs`` is something else, such as a spec alone: packages of others make rules, too."""
        if not isinstance(self.specs, tuple) or not all(isinstance(spec, FindingSpec) for spec in self.specs):
            raise TypeError(f"specs of the rule {self.name!r} must be a tuple of FindingSpec: specs=(SPEC,)")
