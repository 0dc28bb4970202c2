"""A scenario survives being written and read."""

import json
from pathlib import Path

from jsonschema import Draft202012Validator
from scenario_files import written

from dtypedoctor.scenario.loading import available, json_schema, load_scenario, resolve, to_yaml

VALIDATOR = Draft202012Validator(json_schema())


def test_the_shipped_scenarios_read_back_equal(tmp_path: Path) -> None:
    """The same on real files."""
    for path in available():
        scenario = load_scenario(path)
        assert load_scenario(written(tmp_path, to_yaml(scenario), name=scenario.name)) == scenario


def test_a_dumped_scenario_leaves_out_defaults() -> None:
    """A minimal scenario for a ticket shows only what matters."""
    _, _, steps = to_yaml(load_scenario(resolve("gemma4_grpo_bf16"))).partition("steps:\n")
    assert steps.splitlines() == [
        "- model:",
        "    name: builtin:gemma4-tiny",
        "    dtype: bfloat16",
        "    outliers:",
        "    - parameters: model.layers.0.mlp.gate_proj.weight",
        "      scale: 550.0",
        "    - parameters: model.layers.0.mlp.up_proj.weight",
        "      scale: 550.0",
        "    lora:",
        "      r: 4",
        "      alpha: 8.0",
        "      targets:",
        "      - q_proj",
        "      - k_proj",
        "      - v_proj",
        "      - o_proj",
        "      - gate_proj",
        "      - up_proj",
        "      - down_proj",
        "  workload:",
        "    kind: grpo",
        "    learning_rate: 0.05",
        "    gradient_accumulation: 4",
    ]


def test_the_json_schema_is_one_and_says_what_each_key_means() -> None:
    """Editors show the descriptions, so every key of every part has one."""
    schema = json_schema()
    Draft202012Validator.check_schema(schema)
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["$id"] == "urn:dtypedoctor:schema:scenario:1"
    for part in (schema, *schema["$defs"].values()):
        assert part["description"]
        assert part["additionalProperties"] is False
        for key, value in part["properties"].items():
            assert value["description"], key


def test_the_json_schema_refuses_a_misspelt_key() -> None:
    """Not everything passes."""
    assert not VALIDATOR.is_valid(
        {"name": "a", "summary": "b", "steps": [{"workload": {"kind": "unload", "stpes": 1}}]}
    )
    assert not VALIDATOR.is_valid({"name": "a", "summary": "b", "steps": []})


def test_the_schema_in_the_docs_is_up_to_date() -> None:
    """After a change of the model: `python tools/schemas.py`."""
    path = Path(__file__).resolve().parents[2] / "docs" / "scenario.schema.json"
    assert json.loads(path.read_text(encoding="utf-8")) == json_schema()
