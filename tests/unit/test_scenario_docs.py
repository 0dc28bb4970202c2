"""`docs/scenarios.md` says what the program does."""

import re
import sys
from pathlib import Path

import pytest
from scenario_files import mistakes, written

from dtypedoctor.scenario.loading import load_scenario
from dtypedoctor.scenario.model import Scenario

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from scenario_tables import key_tables

PAGE = (Path(__file__).parents[2] / "docs" / "scenarios.md").read_text()
EXAMPLES = {
    block.split("\n")[0].removeprefix("name: "): block
    for block in re.findall(r"```yaml\n(name: .*?)```", PAGE, re.DOTALL)
}


@pytest.mark.parametrize("part", key_tables())
def test_every_key_of_every_part_is_on_the_page(part: str) -> None:
    """The tables are those that the model itself gives; on a failure, paste the expected one into the page."""
    match = re.search(rf"^### {part}\n\n(?:[^|#]+\n)*?\n(?P<table>(?:\|.*\n)+)", PAGE, re.MULTILINE)
    assert match is not None
    assert match["table"].strip() == key_tables()[part]


def test_a_table_says_what_is_wanted_and_what_holds_if_left_out() -> None:
    """One row of each kind."""
    tables = key_tables()
    for part, row in (
        ("Scenario", "| `name` | a name | required | Name, equal to the file name without `.yaml`. |"),
        (
            "Scenario",
            "| `seed` | an integer, at least 0, less than 4294967296 | `3407` | Seed of weights, data and",
        ),
        ("Scenario", "| `expect` | [Expectation](#expectation) | empty | What this scenario shows. |"),
        ("Train", "| `kind` | `train` | required | Chooses this workload. |"),
        ("Train", "| `max_grad_norm` | a number, more than 0, or `null` | `1.0` | Largest gradient norm; no clipping"),
        ("Lora", "| `targets` | a list of texts, at least 1 of them | required | Names of the modules to adapt, as"),
        ("Quantization", "| `skip` | a list of texts | `[lm_head]` | Modules that stay unquantised"),
        ("Script", "| `path` | text | none | Path of the script. |"),
    ):
        assert row in tables[part]


def test_the_tables_of_keys_reach_every_part_of_a_scenario() -> None:
    """The tables are followed from the scenario down, through lists and unions."""
    assert set(key_tables()) == {"Scenario", *Scenario.model_json_schema()["$defs"]}


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
