"""Reads traces and says what went wrong. No torch.

What rules find is put in order; findings in a damaged trace are not called proven, findings of a process without optimizer steps
count calls, and ablations that tell causes apart are offered: no autocast, attention in steps, nothing compiled, a loss scale of 1. Rules are the modules of ``dtypedoctor.rules``, found by being there.
"""

import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from dtypedoctor.diagnosis.checkpoint import Subject
from dtypedoctor.diagnosis.rule import (
    FAMILIES,
    Confidence,
    Detector,
    Family,
    Finding,
    FindingSpec,
    Link,
    Rule,
    Severity,
    most_severe_first,
)
from dtypedoctor.diagnosis.wording import class_of
from dtypedoctor.errors import DoctorError, UsageError
from dtypedoctor.foreign_files import reason
from dtypedoctor.interruptions import contained
from dtypedoctor.plugins import Correction, give_up, label_of, registered, switched_off
from dtypedoctor.text import did_you_mean, quoted
from dtypedoctor.trace.events import ScalerState
from dtypedoctor.trace.model import Trace
from dtypedoctor.trace.records.execution import AutocastRegion, CompileCounts

Read = TypeVar("Read")

BUILT_IN = "dtypedoctor.rules"
"""The package whose modules name their rules in ``RULES``. Rules import the diagnosis, so it looks them up when they are first needed."""


@cache
def rules() -> tuple[Rule, ...]:
    """Every rule, those of plug-ins included, in the order of precedence."""
    return in_order((*_built_in(), *map(_shielded, registered(Rule).values())))


def in_order(found: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules by their priority."""
    return tuple(sorted(found, key=lambda rule: (rule.priority, rule.name)))


def _shielded(rule: Rule) -> Rule:
    """A plug-in's rule, which finds nothing where it raises or yields no proper finding, and is named as left out then."""
    label = f"dtypedoctor.rules plug-in {rule.name!r}"

    def checked(one: Finding, read: object) -> Finding:
        # raises TypeError, which says what is wrong, where ``one`` is no finding that can be printed
        if not isinstance(one, Finding):
            raise TypeError(f"it yields {type(one).__name__}, not Finding; make_finding makes one of a Statement")
        for name in (field.name for field in fields(Finding)):
            value = getattr(one, name)
            types = _TYPES.get(name, (str, type(None)))
            if not isinstance(value, types):
                wanted = " or ".join("None" if allowed is type(None) else allowed.__name__ for allowed in types)
                raise TypeError(f"{name} of its finding {one.id!r} is {type(value).__name__}, not {wanted}")
            if isinstance(value, tuple | list):
                _require_items(one.id, name, value)
        # The fixes for its module's class come first, which `make_finding` leaves out where it is not told the class. Where the
        # trace does not know the class either, they are those for any class: a correction that does not fit says so.
        spec = spec_of(one.id)
        if one.severity is Severity.INFO:
            return one
        cls = class_of(read, one.fqn) if isinstance(read, Trace) and one.fqn is not None else ""
        if cls:
            first = spec.remedies_by_class.get(cls, ())
        else:
            first = spec.proposed if tuple(one.remedies) == spec.remedies else ()
        return replace(one, remedies=tuple(dict.fromkeys((*first, *one.remedies))))

    def shielded(find: Callable[[Read], Iterable[Finding]]) -> Callable[[Read], Iterable[Finding]]:
        def found(read: Read) -> Iterable[Finding]:
            with contained(lambda error: give_up(label, error)):
                return tuple(checked(one, read) for one in find(read))
            return ()  # somebody else's rule must not end the diagnosis

        return found

    return replace(
        rule,
        detect=shielded(rule.detect) if rule.detect else None,
        inspect=shielded(rule.inspect) if rule.inspect else None,
        compare=shielded(rule.compare) if rule.compare else None,
    )


_TYPES: Mapping[str, tuple[type, ...]] = {
    "severity": (Severity,), "confidence": (Confidence,), "id": (str,), "summary": (str,), "cause": (str,),
    **dict.fromkeys(("step", "rank", "call"), (int, type(None))),
    **dict.fromkeys(("evidence", "remedies", "references", "provenance", "met"), (tuple, list)),
}  # fmt: skip
"""What a field of a finding may hold; every other field is text or None."""


def _require_items(finding: str, name: str, items: Collection[object]) -> None:
    """Raises TypeError where a field of a finding holds something else than texts, or links."""
    item_type = Link if name in ("provenance", "met") else str
    for item in items:
        if not isinstance(item, item_type):
            raise TypeError(f"{name} of its finding {finding!r} holds {type(item).__name__}, not {item_type.__name__}")


def _built_in() -> Iterator[Rule]:
    package = import_module(BUILT_IN)
    for module in pkgutil.walk_packages(package.__path__, f"{BUILT_IN}."):
        yield from getattr(import_module(module.name), "RULES", ())


@cache
def _specs() -> Mapping[str, FindingSpec]:
    """Every spec by its id, in the order of precedence of the rules that find it."""
    specs: dict[str, FindingSpec] = {}
    for rule in rules():
        for spec in rule.specs:
            specs.setdefault(spec.id, spec)
    return {name: _with_corrections(spec) for name, spec in specs.items()}


def _with_corrections(spec: FindingSpec) -> FindingSpec:
    """The spec with the corrections that say themselves which findings they fix: those for a class of module come first."""
    names = {spec.id, *spec.aliases}
    remedies, by_class, settled_by = list(spec.remedies), dict(spec.remedies_by_class), list(spec.settled_by)
    for one in registered(Correction).values():
        for cls in (cls for finding, cls in one.fixes if finding in names and not one.library):
            if cls:
                by_class[cls] = (*by_class.get(cls, ()), one.id)
            else:
                remedies.append(one.id)
        if names.intersection(one.proves):
            settled_by.append(one.id)
    return replace(spec, remedies=tuple(remedies), remedies_by_class=by_class, settled_by=tuple(settled_by))


def corrections_of_library(finding: str, source: str | None, cls: str = "") -> tuple[str, ...]:
    """Ids of the corrections for ``finding`` that edit the library in which its line lies.

    Args:
        finding: canonical id of a finding.
        source: ``package/folder/file.py:line``, or None.
        cls: name of the class of the module that the finding originates in.
    """
    library = (source or "").partition("/")[0]
    everything = registered(Correction).values() if library else ()
    return tuple(
        one.id
        for one in everything
        if one.library == library
        and any(canonical(name) == finding and wanted in ("", cls) for name, wanted in one.fixes)
    )


@cache
def _names() -> Mapping[str, str]:
    """The id that each id and alias stands for."""
    return {name: spec.id for spec in _specs().values() for name in (spec.id, *spec.aliases)}


def canonical(name: str) -> str:
    """The finding id that ``name``, an id or an alias, stands for; ``name`` itself where it is neither."""
    return _names().get(name, name)


def spec_of(finding: str) -> FindingSpec:
    """What is known of the finding with this id or alias; of one that no rule knows, an empty spec."""
    known = _specs().get(canonical(finding))
    return known if known is not None else FindingSpec(id=finding, title="", family=_UNKNOWN)


_UNKNOWN = Family(id="unknown", label="unknown", title="Unknown", summary="")


def finding_ids() -> tuple[str, ...]:
    """Every finding id, family by family."""
    return tuple(spec.id for specs in by_family().values() for spec in specs)


def typed_ids() -> frozenset[str]:
    """What a person may type for a finding: every id and every alias."""
    return frozenset(_names())


def by_family() -> Mapping[Family, tuple[FindingSpec, ...]]:
    """Every spec by its family: the built-in families first, in the order of the documentation's index."""
    families = dict.fromkeys((*FAMILIES, *(spec.family for spec in _specs().values())))
    return {family: tuple(spec for spec in _specs().values() if spec.family == family) for family in families}


_PACKAGE = Path(__file__).resolve().parents[1]


def page(finding_id: str) -> str:
    """The Markdown text of the page about ``finding_id``, an id or an alias, front matter included.

    Raises:
        UsageError: there is no such finding, or the plug-in that has it comes without a readable page.
        DoctorError: the program was installed without its pages.
    """
    if finding_id not in typed_ids():
        message = f"{quoted(finding_id)}: no such finding or fix{did_you_mean(finding_id, typed_ids())}"
        raise UsageError(message, f"`dtypedoctor explain` lists all.{switched_off()}")
    spec = spec_of(finding_id)
    label = next((label_of(Rule, rule.name) for rule in rules() if spec.id in (one.id for one in rule.specs)), "")
    if label and spec.page is None:
        raise UsageError(f"there is no page about {spec.id}: {label} names none", "Set `page` of its FindingSpec.")
    path = Path(spec.page or folder() / f"{spec.id}.md")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        if not label:
            raise _not_installed() from error
        raise UsageError(
            f"the page about {spec.id} cannot be read: {path}: {reason(error)}",
            f"It belongs to {label}; `page` of the FindingSpec names the file, which the package must contain.",
        ) from error


def readable_page(finding_id: str) -> str:
    """The same page without its front matter, which is for programs."""
    text = page(finding_id)
    if text.startswith("---\n"):
        _, _, text = text.removeprefix("---\n").partition("\n---\n")
    return text.strip()


def folder(package: Path = _PACKAGE) -> Path:
    """The folder with the pages that belongs to the installed ``package``.

    A wheel holds them inside the package; an editable install and a source checkout have them in ``docs`` beside it.

    Raises:
        DoctorError: there are no pages.
    """
    packed = package / "data" / "findings"
    if packed.is_dir():
        return packed
    beside = package.parent / "docs" / "findings"
    # in site-packages a folder called `docs` would be somebody else's
    if beside.is_dir() and (package.parent / "pyproject.toml").is_file():
        return beside
    raise _not_installed()


def _not_installed() -> DoctorError:
    return DoctorError("the pages about findings are missing from this installation", "Install dtypedoctor again.")


def diagnose(trace: Trace) -> tuple[Finding, ...]:
    """Everything that the rules find in ``trace``, the root cause before its consequences; they are asked once."""
    return trace.once(_diagnosed)


def _diagnosed(trace: Trace) -> tuple[Finding, ...]:
    found = [finding for rule in rules() if rule.detect for finding in findings_of(rule.detect, trace)]
    ordered = tuple(with_tie_breakers(finding, trace) for finding in most_severe_first(found))
    if trace.by_call:
        ordered = tuple(map(in_calls, ordered))
    return tuple(map(cap_confidence, ordered)) if trace.damage else ordered


def preflight(subject: Subject) -> tuple[Finding, ...]:
    """Everything that the rules find in ``subject``, what matters most first."""
    return most_severe_first(finding for rule in rules() if rule.inspect for finding in rule.inspect(subject))


_STUMBLES = (ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, StopIteration)
"""What a detector may raise that looks for a record which is lost."""

_WHY = "A part of the trace is lost, so what was found in the rest is not called proven."


def findings_of(detector: Detector, trace: Trace) -> tuple[Finding, ...]:
    """What the detector sees; nothing where it fails over what a damaged trace lacks."""
    if not trace.damage:
        return tuple(detector(trace))
    try:
        return tuple(detector(trace))
    except _STUMBLES:
        return ()


def cap_confidence(finding: Finding) -> Finding:
    """The finding, no more than likely."""
    if finding.confidence is not Confidence.PROVEN:
        return finding
    return replace(finding, confidence=Confidence.LIKELY, proven_by=None, evidence=(*finding.evidence, _WHY))


def in_calls(finding: Finding) -> Finding:
    """The finding with the number of the outermost module call where detectors say that of a step; the first is in step 1 anyhow."""
    if finding.step is None or finding.step == 1:
        return finding
    step = re.compile(rf"\bstep {finding.step}\b")

    def reworded(text: str) -> str:
        return step.sub(f"call {finding.step}", text, count=1)  # what follows may be quoted from a message

    return replace(
        finding,
        call=finding.step,
        summary=reworded(finding.summary),
        cause=reworded(finding.cause),
        evidence=tuple(map(reworded, finding.evidence)),
    )


FUSED = re.compile(
    r"(?<!_math)_(flash|efficient|cudnn)_attention|flash_attn|flex_attention|scaled_dot_product_attention\b"
)
"""Kernels and functions that compute attention in one piece."""


def with_tie_breakers(finding: Finding, trace: Trace) -> Finding:
    """The finding, with the ablations that would settle something about it behind the fixes."""
    if finding.severity is Severity.INFO:
        return finding
    wanted = spec_of(finding.id).ablations
    offered = [name for name, tells in TIE_BREAKERS.items() if name in wanted and tells(finding, trace)]
    return replace(finding, remedies=tuple(dict.fromkeys((*finding.remedies, *offered))))


def _autocast(finding: Finding, trace: Trace) -> bool:
    """Without regions that cast, values have the dtypes that the program itself gave them."""
    dtypes = {o.what.dtype for o in trace.observed(AutocastRegion) if o.what.enabled}
    return finding.dtype in dtypes if spec_of(finding.id).fits_wider_dtype else bool(dtypes)


def _compiled(finding: Finding, trace: Trace) -> bool:
    """With every operator on record nothing is compiled, so a finding from such a trace is not the compiler's."""
    compiled = any(seen.what.unique_graphs for seen in trace.observed(CompileCounts))
    return compiled and finding.severity is Severity.ERROR


TIE_BREAKERS: Mapping[str, Callable[[Finding, Trace], bool]] = {
    "autocast-off": _autocast,
    # the operators inside of a fused kernel are not seen, and it computes otherwise than they would
    "eager-attention": lambda finding, trace: FUSED.search(finding.op or "") is not None,
    "compile-off": _compiled,
    # a gradient leaves the range by itself, or because the loss was multiplied
    "loss-scale-one": lambda finding, trace: bool(trace.all(ScalerState)),
}
"""By ablation, whether the trace has what it takes away; which findings it settles something about, their specs say."""
