"""What the shell completes behind options and arguments: names of scenarios, findings, fixes, dtypes. Nothing here imports torch.

Switched on by ``dtypedoctor --install-completion``; each press of the tab key starts the program, so what knows the names is imported then.
"""

from collections.abc import Callable, Iterable


def _scenarios() -> Iterable[str]:
    from dtypedoctor.scenario.loading import available

    return (path.stem for path in available())


def _findings() -> Iterable[str]:
    from dtypedoctor.diagnosis.registry import finding_ids

    return finding_ids()


def _fixes() -> Iterable[str]:
    from dtypedoctor.trials.remedies import ABLATIONS, remedies

    return (name for name in remedies() if name not in ABLATIONS.values())


def _ablations() -> Iterable[str]:
    from dtypedoctor.trials.remedies import ABLATIONS

    return ABLATIONS


def _corrections() -> Iterable[str]:
    from dtypedoctor.plugins import Correction, registered

    return (one.id for one in registered(Correction).values() if one.in_scripts and not one.needs_modules)


def _executors() -> Iterable[str]:
    from dtypedoctor.runner.executors import EXECUTORS

    return EXECUTORS


def _builtin_models() -> Iterable[str]:
    from dtypedoctor.plugins import Model, registered

    return (f"builtin:{name}" for name in registered(Model))


def _among(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Complete with the names that begin as what was typed; files are completed by the shell where none does."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


scenarios, explained, fixes, ablations = _among(_scenarios), _among(_findings), _among(_fixes), _among(_ablations)
corrections, executors, builtin_models = _among(_corrections), _among(_executors), _among(_builtin_models)
dtypes = _among(lambda: ("bfloat16", "float16", "float32", "float64"))
devices = _among(lambda: ("auto", "cpu", "cuda"))
