"""The JSON Schema of scenarios, for editors."""

import json
from pathlib import Path

from jsonschema import Draft202012Validator

from dtypedoctor.lab.scenarios.loading import json_schema

VALIDATOR = Draft202012Validator(json_schema())


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
