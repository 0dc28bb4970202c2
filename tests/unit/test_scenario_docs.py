"""`docs/scenarios.md` and `docs/scenario-keys.md` say what the program does."""

import re
import sys
from pathlib import Path

import pytest
from scenario_files import mistakes, written

from dtypedoctor.lab.scenarios.loading import load_scenario
from dtypedoctor.lab.scenarios.model import Scenario

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from scenario_tables import PAGE as KEYS
from scenario_tables import key_lists, with_lists

PAGE = KEYS.with_name("scenarios.md").read_text()
EXAMPLES = {
    block.split("\n")[0].removeprefix("name: "): block
    for block in re.findall(r"```yaml\n(name: .*?)```", PAGE, re.DOTALL)
}


def test_every_key_of_every_part_is_on_the_page() -> None:
    """The lists are those that the model itself gives; on a failure, run `python tools/scenario_tables.py`."""
    text = KEYS.read_text(encoding="utf-8")
    assert with_lists(text) == text


def test_a_list_says_what_is_wanted_and_what_holds_if_left_out() -> None:
    """One key of each kind."""
    lists = key_lists()
    for part, row in (
        ("Scenario", "- `name` (a name; required): Name, equal to the file name without `.yaml`."),
        ("Scenario", "- `seed` (an integer, at least 0, less than 4294967296; `3407`): Seed of weights, data and"),
        ("Scenario", "- `expect` ([Expectation](#expectation)): What this scenario shows."),
        ("Train", "- `max_grad_norm` (a number, more than 0, or `null`; `1.0`): Largest gradient norm; no clipping"),
        ("Lora", "- `targets` (a list of texts, at least 1 of them; required): Names of the modules to adapt, as"),
        ("Quantization", "- `skip` (a list of texts; `[lm_head]`): Modules that stay unquantised"),
        ("Script", "- `path` (text): Path of the script."),
        ("Autocast", "- `dtype` (a dtype; required): Autocast dtype."),
        ("Lora", "- `dora` (`false`): Use DoRA"),
    ):
        assert row in lists[part]


def test_the_lists_of_keys_reach_every_part_of_a_scenario() -> None:
    """The parts are followed from the scenario down, through lists and unions."""
    assert set(key_lists()) == {"Scenario", *Scenario.model_json_schema()["$defs"]}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "demo"])
def test_the_examples_on_the_page_load(tmp_path: Path, name: str) -> None:
    """What a reader copies must work."""
    assert load_scenario(written(tmp_path, EXAMPLES[name], name=name)).name == name


def test_the_mistakes_on_the_page_are_those_that_are_told(tmp_path: Path) -> None:
    """The example of the error format is a real one."""
    match = re.search(r"```text\n(demo\.yaml:.*?)```", PAGE, re.DOTALL)
    assert match is not None
    said = mistakes(written(tmp_path, EXAMPLES["demo"], name="demo"))
    assert [f"demo.yaml:{line}" for line in said] == match[1].splitlines()
