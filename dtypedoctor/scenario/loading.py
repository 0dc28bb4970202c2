"""Loads a scenario's file: all of its mistakes at once, each with its place, or the Scenario."""

from collections.abc import Collection, Mapping
from pathlib import Path

from dtypedoctor.scenario.catalog import not_found
from dtypedoctor.scenario.checking import check, check_ids, check_name
from dtypedoctor.scenario.model import Scenario
from dtypedoctor.scenario.problems import refusal
from dtypedoctor.scenario.source import read_text
from dtypedoctor.scenario.yaml_nodes import read_tree

__all__ = ["load_scenario"]

_HINT = "docs/scenarios.md lists every key."


def load_scenario(path: Path, known: Mapping[str, Collection[str]] | None = None) -> Scenario:
    """Reads a scenario.

    Args:
        path: the file; its name without the ending is the scenario's name.
        known: ids that exist, by what they name (``finding``, ``remedy``, ``correction``); ids of the scenario that are
            not among them are mistakes. What is left out is checked for its form only.

    Raises:
        UsageError: the file cannot be read, or holds mistakes: one ``file:line:column: what is wrong`` a line, in the
            order of the file.
    """
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise not_found(str(path)) from None
    tree, problems = read_tree(text)
    scenario: Scenario | None = None
    if tree is not None:
        scenario, found = check(tree)
        told = check_name(tree, path.stem) + check_ids(tree, known or {})
        told_places = {problem.place for problem in told}
        problems += told + [problem for problem in found if problem.place not in told_places]
    if problems or scenario is None:
        raise refusal(path, problems, _HINT)
    return scenario
