"""Options of the command line by their present and their old names."""

import pytest
from typer.main import get_command

from dtypedoctor.cli.main import app
from dtypedoctor.errors import UsageError
from dtypedoctor.trials.remedies import asked_for

COMMAND = get_command(app)


def values_of(verb: str, *words: str) -> dict[str, object]:
    """What the parser makes of a command line."""
    whole = COMMAND.make_context("dtypedoctor", [verb, *words])
    return COMMAND.commands[verb].make_context(verb, list(words), parent=whole).params  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("old", "present"),
    [
        (["exec", "--nproc", "2", "a.py"], ["exec", "--nproc-per-node", "2", "a.py"]),
        (["exec", "--nproc_per_node=2", "a.py"], ["exec", "--nproc-per-node", "2", "a.py"]),
        (["exec", "--watch-every", "8", "a.py"], ["exec", "--every-n-steps", "8", "a.py"]),
        (["exec", "--certify", "a.py"], ["exec", "--verify-uninstrumented", "a.py"]),
        (["run", "--nproc", "2", "--watch-every", "0", "a"], ["run", "--nproc-per-node", "2", "--every-n-steps", "0", "a"]),
    ],
)  # fmt: skip
def test_an_old_name_means_the_present_one_and_is_not_in_the_help(old: list[str], present: list[str]) -> None:
    """Scripts that were written for it go on working."""
    assert values_of(*old) == values_of(*present) != values_of(present[0], present[-1])
    names = {name for option in COMMAND.commands[old[0]].params for name in option.opts}  # type: ignore[attr-defined]
    assert not names & {"--nproc", "--watch-every", "--certify"}


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
