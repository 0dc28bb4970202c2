"""How options of the command line are named."""

import pytest
from typer.main import get_command

from dtypedoctor.cli.main import with_verb
from dtypedoctor.errors import UsageError
from dtypedoctor.examination.fixes import asked_for

COMMAND = get_command(with_verb(""))


def values_of(verb: str, *words: str) -> dict[str, object]:
    whole = COMMAND.make_context("dtypedoctor", [verb, *words])
    return COMMAND.commands[verb].make_context(verb, list(words), parent=whole).params  # type: ignore[attr-defined]


def test_an_option_may_be_typed_with_underscores() -> None:
    """As torchrun's options may."""
    assert values_of("exec", "--nproc_per_node=2", "a.py") == values_of("exec", "--nproc-per-node", "2", "a.py")


def test_options_of_the_script_keep_their_names() -> None:
    """What stands after the script is the script's own, whatever it is called."""
    assert list(values_of("exec", "a.py", "--nproc", "2", "--a_b")["arguments"]) == ["--nproc", "2", "--a_b"]


def test_an_ablation_goes_by_its_name_by_its_id_and_behind_try() -> None:
    """Each once; what is not one is refused with the option that takes it."""
    assert asked_for(["autocast", "compile-off"], ["autocast-off", "bfloat16"]) == [
        "autocast-off",
        "compile-off",
        "bfloat16",
    ]
    with pytest.raises(UsageError, match="no ablation 'bfloat16'") as refused:
        asked_for(["bfloat16"], [])
    assert refused.value.hint == "Use --try bfloat16."
    with pytest.raises(UsageError, match="no fix 'hope'"):
        asked_for([], ["hope"])
