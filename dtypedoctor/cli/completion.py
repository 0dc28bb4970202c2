"""What the shell completes behind options and arguments: names of scenarios, findings, fixes, dtypes. Nothing here imports torch.

Switched on by ``dtypedoctor --install-completion``; each press of the tab key starts the program.
"""

from collections.abc import Iterable, Iterator


def scenarios(incomplete: str) -> list[str]:
    """Names of the scenarios that come with the program; files are completed by the shell where none of these begins so."""
    from dtypedoctor.scenario.loading import available

    return _beginning(incomplete, (path.stem for path in available()))


def explained(incomplete: str) -> list[str]:
    """Ids of findings and of corrections of libraries."""
    from dtypedoctor.diagnosis.registry import by_family
    from dtypedoctor.plugins import Correction, registered

    findings = (spec.id for specs in by_family().values() for spec in specs)
    return _beginning(incomplete, [*findings, *(one.id for one in registered(Correction).values() if one.edits)])


def fixes(incomplete: str) -> list[str]:
    """Ids of fixes, for ``exec --try``."""
    from dtypedoctor.trials.remedies import ABLATIONS, remedies

    return _beginning(incomplete, (name for name in remedies() if name not in ABLATIONS.values()))


def ablations(incomplete: str) -> list[str]:
    """What ``exec --ablate`` can take away."""
    from dtypedoctor.trials.remedies import ABLATIONS

    return _beginning(incomplete, ABLATIONS)


def corrections(incomplete: str) -> list[str]:
    """Ids of corrections that ``treat --with`` can put into a script."""
    from dtypedoctor.plugins import Correction, registered

    usable = (one.id for one in registered(Correction).values() if one.in_scripts and not one.needs_modules)
    return _beginning(incomplete, usable)


def dtypes(incomplete: str) -> list[str]:
    """Names of the dtypes that a model can have."""
    return _beginning(incomplete, ("bfloat16", "float16", "float32", "float64"))


def devices(incomplete: str) -> list[str]:
    """Names of devices."""
    return _beginning(incomplete, ("auto", "cpu", "cuda"))


def executors(incomplete: str) -> list[str]:
    """What runs scenarios and probes."""
    from dtypedoctor.runner.executors import EXECUTORS

    return _beginning(incomplete, EXECUTORS)


def builtin_models(incomplete: str) -> list[str]:
    """``builtin:NAME`` of each model that is built without a download."""
    from dtypedoctor.plugins import Model, registered

    return _beginning(incomplete, (f"builtin:{name}" for name in registered(Model)))


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    found: Iterator[str] = (name for name in names if name.startswith(incomplete))
    return list(found)
