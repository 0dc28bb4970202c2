"""What a bisection found, in a sentence or two."""

from collections.abc import Callable, Sequence

from dtypedoctor.diagnosis.finding import Severity
from dtypedoctor.report.numbers import counted, number
from dtypedoctor.trials.bisection.results import Bisection, End
from dtypedoctor.trials.bisection.symptoms import Kind, Symptom, part_in_words
from dtypedoctor.trials.results import Outcome

__all__ = ["answer"]

_MOST_NAMED = 5
_NEAR_THE_END = 0.5
"""Share of a dtype's range from which on a healthy run says so: a factor of two is little for activations."""


def answer(found: Bisection) -> str:
    """The answer for a person."""
    return _ANSWERS[found.end](found)


def _found(found: Bisection) -> str:
    if not found.confirmed:
        reason = found.trials[0].reason if found.trials else "that was not tried"
        return f"{_kept(found)} makes {found.workload} healthy, but not the whole run: {reason}."
    story = f"{_kept(found)} is enough for a healthy run; without it: {found.failure.reason}."
    return f"{story}{_by_corrections(found)}{_now_and_then(found)}"


def _now_and_then(found: Bisection) -> str:
    result = found.modules.result if found.modules is not None else None
    if result is None or not result.flaky:
        return ""
    return " The failure is flaky: a run that was repeated came out differently, so this may be luck."


def _by_corrections(found: Bisection) -> str:
    """The corrections that do the same, or as far as they do; nothing where there are none."""
    names = found.corrections.culprits if found.corrections is not None else ()
    trial = next((t for t in found.trials if t.remedy == "+".join(names)), None)
    if not names or trial is None:
        return ""
    one = len(names) == 1
    subject = (
        f"The correction{'' if one else 's'} {_enumerated(names)}{' alone' if len(names) < len(found.offered) else ''}"
    )
    if trial.outcome is Outcome.FIXED:
        return f" {subject} {'does' if one else 'do'} the same."
    return (
        f" {subject} {'is' if one else 'are'} enough for {found.workload}, but not for the whole run: {trial.reason}."
    )


def _kept(found: Bisection) -> str:
    names = [part_in_words(name) for name in found.kept]
    more = len(names) - _MOST_NAMED
    shown = _enumerated([*names[:_MOST_NAMED], f"{more} more"] if more > 0 else names)
    return f"Keeping {'only ' if len(names) == 1 else ''}{shown} in float32"


def _enumerated(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


def _healthy(found: Bisection) -> str:
    told = (
        f"It does not fail: finite, without a dtype error, and as near to float32 as rounding allows{_how_near(found)}."
        f"{_near_the_end(found.failure)}"
    )
    others = [finding.id for finding in found.treatment.findings if finding.severity is not Severity.INFO]
    notes = [finding.id for finding in found.treatment.findings if finding.severity is Severity.INFO]
    if others:
        told += f" What is found besides ({', '.join(others)}) is nothing that a bisection can look for."
    return f"{told} Noted besides: {', '.join(notes)}." if notes else told


def _near_the_end(healthy: Symptom) -> str:
    """What is about to overflow: other tokens may bring it over the end."""
    if healthy.share is None or healthy.share < _NEAR_THE_END or healthy.absmax is None or healthy.fqn is None:
        return ""
    return f" {part_in_words(healthy.fqn)} comes to {number(healthy.absmax)}, {healthy.share:.0%} of what its dtype can hold."


def _how_near(found: Bisection) -> str:
    return f" ({found.tolerance:.3g} accepted)" if found.tolerance is not None else ""


def _domain_error(found: Bisection) -> str:
    name = "domain-error: it" if found.failure.kind is Kind.NOT_FINITE else "It"
    return f"{name} fails in float32 as well, so this is no matter of precision ({found.note})."


def _rounded_weights(found: Bisection) -> str:
    return (
        f"The weights do not survive the cast: as the dtype rounds them it fails even in float32 ({found.note}), as they were before "
        "it does not. Keeping modules in float32 comes too late for that; load these weights in a wider dtype."
    )


def _outside(found: Bisection) -> str:
    return (
        f"No module is to blame: it fails even with all {counted(found.candidates, 'part')} of the model in float32 ({found.note}), "
        "but not in the float32 reference. What differs lies outside of the modules."
    )


def _unresolved(found: Bisection) -> str:
    return f"Nothing can be said about which module is to blame: {found.note}."


def _interrupted(found: Bisection) -> str:
    if not found.culprits:
        return f"Interrupted before anything was known{': ' + found.note if found.note else ''}."
    minimal = found.modules is not None and found.modules.result is not None
    known = "" if minimal else f" Some of these {counted(len(found.culprits), 'part')} may not be needed."
    return f"Interrupted. {_kept(found)} is enough for {found.workload} to be healthy.{known}"


_ANSWERS: dict[End, Callable[[Bisection], str]] = {
    End.FOUND: _found,
    End.HEALTHY: _healthy,
    End.DOMAIN_ERROR: _domain_error,
    End.ROUNDED_WEIGHTS: _rounded_weights,
    End.OUTSIDE: _outside,
    End.UNRESOLVED: _unresolved,
    End.INTERRUPTED: _interrupted,
}
