"""Every rule there is: the modules of ``dtypedoctor.rules``, which are found by being there; and the page about each finding."""

import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from dtypedoctor.diagnosis.finding import Finding
from dtypedoctor.diagnosis.rule import FAMILIES, Family, FindingSpec, Rule
from dtypedoctor.errors import DoctorError, UsageError
from dtypedoctor.interruptions import contained
from dtypedoctor.plugins import Correction, give_up, registered
from dtypedoctor.scenario.problems import did_you_mean, quoted

__all__ = ["PRECEDENCE", "by_family", "canonical", "finding_ids", "folder", "page", "rules", "spec_of", "typed_ids"]


Read = TypeVar("Read")

BUILT_IN = "dtypedoctor.rules"
"""The package whose modules name their rules in ``RULES``. Rules import the diagnosis, so it looks them up when they are first needed."""

PRECEDENCE = (
    "mismatch", "scaling", "streams", "non-finite", "loss-scale", "compilation", "missing-patches", "stale-autocast-cache", "integer-casts",
    "rescues", "erased", "gradient-underflow", "update-stall", "router-flips", "logprob-gap", "rounded-positions", "partial-stall",
    "rotary-tables", "loading", "loaded-dtype", "packed-weights", "trainable-weights", "shard-units", "rotary-weights", "kept-weights",
)  # fmt: skip
"""Names of rules: of two findings of one severity, that of the earlier rule comes first. Rules without a place here follow, by name."""


@cache
def rules() -> tuple[Rule, ...]:
    """Every rule, those of plug-ins included, in the order of precedence."""
    return in_order((*_built_in(), *map(_shielded, registered(Rule).values())))


def in_order(found: Iterable[Rule]) -> tuple[Rule, ...]:
    """The rules in the order of precedence."""
    places = {name: place for place, name in enumerate(PRECEDENCE)}
    return tuple(sorted(found, key=lambda rule: (places.get(rule.name, len(places)), rule.name)))


def _shielded(rule: Rule) -> Rule:
    """A plug-in's rule, which finds nothing where it raises, and is named as left out then."""

    def shielded(find: Callable[[Read], Iterable[Finding]]) -> Callable[[Read], Iterable[Finding]]:
        def found(read: Read) -> Iterable[Finding]:
            with contained(lambda error: give_up(f"dtypedoctor.rules plug-in {rule.name!r}", error)):
                return tuple(find(read))
            return ()  # somebody else's rule must not end the diagnosis

        return found

    return replace(
        rule,
        detect=shielded(rule.detect) if rule.detect else None,
        inspect=shielded(rule.inspect) if rule.inspect else None,
    )


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
    remedies, by_class, settled_by = list(spec.remedies), dict(spec.remedies_by_class), list(spec.settled_by)
    for one in registered(Correction).values():
        for cls in (cls for finding, cls in one.fixes if finding == spec.id):
            if cls:
                by_class[cls] = (*by_class.get(cls, ()), one.id)
            else:
                remedies.append(one.id)
        if spec.id in one.proves:
            settled_by.append(one.id)
    return replace(spec, remedies=tuple(remedies), remedies_by_class=by_class, settled_by=tuple(settled_by))


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
        UsageError: there is no such finding.
        DoctorError: the program was installed without its pages.
    """
    if finding_id not in typed_ids():
        raise _unknown(finding_id)
    spec = spec_of(finding_id)
    path = spec.page or folder() / f"{spec.id}.md"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise _not_installed() from error


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


def _unknown(finding_id: str) -> UsageError:
    message = f"{quoted(finding_id)}: no such finding{did_you_mean(finding_id, typed_ids())}"
    return UsageError(message, f"Known findings: {', '.join(finding_ids())}")


def _not_installed() -> DoctorError:
    return DoctorError("the pages about findings are missing from this installation", "Install dtypedoctor again.")
