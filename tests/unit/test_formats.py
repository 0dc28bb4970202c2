"""The formats by name: the command line names those that there are, although it imports no renderer to do so."""

import pytest

from dtypedoctor.cli.output import FormatOption
from dtypedoctor.errors import UsageError
from dtypedoctor.report.formats import FORMATS, format_named


def test_help_names_every_format() -> None:
    """A format that is registered and not named would be found by nobody."""
    (option,) = FormatOption.__metadata__  # type: ignore[attr-defined]
    assert option.metavar == f"[terminal|{'|'.join(one.name for one in FORMATS)}]"


@pytest.mark.parametrize("name", [one.name for one in FORMATS])
def test_a_format_is_registered_under_its_own_name(name: str) -> None:
    """And says what its files end in."""
    found = format_named(name)
    assert found.name == name
    assert found.suffix.startswith(".")


def test_an_unknown_format_is_refused_with_those_that_are_known() -> None:
    """Before anything has run."""
    with pytest.raises(UsageError, match="there is no format 'yaml'"):
        format_named("yaml")
