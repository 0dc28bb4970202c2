"""What the shell completes behind options and arguments: names of scenarios, findings, fixes, dtypes. Nothing here imports torch.

Switched on by ``dtypedoctor --install-completion``; each press of the tab key starts the program, so what knows the names is imported then.
"""

from collections.abc import Callable, Iterable


def _findings() -> Iterable[str]:
    from dtypedoctor.diagnosis.registry import finding_ids

    return finding_ids()


def _fixes() -> Iterable[str]:
    from dtypedoctor.examination.fixes import ABLATIONS, remedies

    return (name for name in remedies() if name not in ABLATIONS.values())


def _ablations() -> Iterable[str]:
    from dtypedoctor.examination.fixes import ABLATIONS

    return ABLATIONS


def _corrections() -> Iterable[str]:
    from dtypedoctor.plugins import Correction, registered

    return (one.id for one in registered(Correction).values() if one.in_scripts and not one.needs_modules)


def among(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Complete with the names that begin as what was typed; files are completed by the shell where none does."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names() if name.startswith(incomplete)]

    return complete


explained, fixes, ablations, corrections = among(_findings), among(_fixes), among(_ablations), among(_corrections)
dtypes = among(lambda: ("bfloat16", "float16", "float32", "float64"))
devices = among(lambda: ("auto", "cpu", "cuda"))
