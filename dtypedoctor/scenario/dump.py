"""Writes a scenario as YAML."""

import re

import yaml

from dtypedoctor.scenario.model import Scenario
from dtypedoctor.scenario.yaml_scalars import PATTERNS

__all__ = ["to_yaml"]


def to_yaml(scenario: Scenario) -> str:
    """The shortest YAML that ``load_scenario`` reads back as an equal scenario: keys at their default are left out.

    Texts must be free of control characters and ``options`` must hold YAML's own kinds of values only, as those of every
    loaded scenario do.
    """
    values = scenario.model_dump(exclude_defaults=True)
    for step in values["steps"]:
        step["workload"] = {"kind": step["workload"]["kind"]} | step["workload"]  # what is done stands first
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """Quotes what the core schema would read as something else than text."""

    yaml_implicit_resolvers: dict[str | None, list[tuple[str, re.Pattern[str]]]] = {  # noqa: RUF012  (PyYAML's own name)
        None: [(f"tag:yaml.org,2002:{kind}", pattern) for kind, pattern in PATTERNS.items()]
    }
