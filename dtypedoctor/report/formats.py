"""The formats by name. One that comes with dtypedoctor is a file ``to_NAME.py`` beside this one, with a ``FORMAT``."""

from dataclasses import replace
from importlib import import_module

import dtypedoctor.report
from dtypedoctor.errors import UsageError
from dtypedoctor.interruptions import contained
from dtypedoctor.plugins import Format, known, label_of, registered
from dtypedoctor.report.document import Document
from dtypedoctor.text import did_you_mean

FORMATS = tuple(import_module(f"dtypedoctor.report.to_{name}").FORMAT for name in dtypedoctor.report.FORMATS)


def format_named(name: str) -> Format:
    """The format of that name, of dtypedoctor or else of a plug-in.

    Raises:
        UsageError: there is none.
    """
    found = registered(Format).get(name)
    if found is None:
        meant = did_you_mean(name, registered(Format))
        raise UsageError(f"--format: there is no format {name!r}{meant}", f"At the prompt: terminal. {known(Format)}")
    return _shielded(found) if label_of(Format, name) else found


def _shielded(format: Format) -> Format:
    """A plug-in's format, whose ``render`` raises UsageError where the plug-in's own raises or returns no text."""

    def render(document: Document) -> str:
        with contained() as ours:
            text = format.render(document)
            if not isinstance(text, str):
                raise TypeError(f"render returned {type(text).__name__}, not str")
            return text
        raise UsageError(
            f"--format {format.name}: {label_of(Format, format.name)} failed: {type(ours.error).__name__}: {ours.error}",
            "`dtypedoctor report` shows a saved run in another format, e.g. --format md.",
        ) from ours.error

    return replace(format, render=render)
