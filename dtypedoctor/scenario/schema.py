"""The JSON Schema of a scenario file, for editors that complete and check YAML while it is written."""

from typing import Any

from dtypedoctor.scenario.model import Scenario

__all__ = ["json_schema"]


def json_schema() -> dict[str, Any]:
    """The schema in draft 2020-12, with each key's description and default.

    It accepts every file that ``load_scenario`` accepts. It cannot say what depends on several keys (a script has either
    ``path`` or ``module``; the name is the file's), so the loader has the last word.
    """
    schema = Scenario.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "dtypedoctor scenario",
    }
