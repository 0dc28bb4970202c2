"""Each script of the corpus, run bare, ends as its header says.

This tests the corpus and not the product, so a script for which `vouched.json` holds its hash under the installed torch is not run
again. After a change of a script::

    python -m pytest -q tests/e2e/test_scripts_fail_as_written.py --rewrite-snapshot

Before a release (``-m release``) all of them are run.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_script import Ended, run_forked
from nursery import preload
from script_corpus import BORN, FAMILIES, Case, cases
from vouched import is_vouched_for, vouch, vouched

from dtypedoctor.diagnosis import finding_ids

ALL = cases()
TO_RUN = [pytest.param(case, marks=pytest.mark.release) if is_vouched_for(case) else case for case in ALL]
"""All scripts; those that are known to be as they say only before a release."""
COMPILED = [case for case in ALL if "torch.compile" in case.source]
SHOWN = 0.9
"""Share of the findings that the corpus shows at least: some need a GPU, or a correction that was asked for, or are new."""
COUNTED = {"compile-graph-break", "recompile-limit"}
"""Findings that Dynamo itself counts."""
LIMIT = re.compile("recompile limit exceeded|recompile_limit reached")
"""What Dynamo counts where it gives a function up; the latter is torch 2.9's."""
TIMING = re.compile(r"(?m)^.*(it/s|s/it|examples/s|runtime).*$")
"""Lines with progress bars and timings."""
TELLING = {"overflow", "underflow", "mismatch", "stale", "bypass", "rescue", "promote", "healthy", "bug", "dtypedoctor"}


def bare(script: Callable[[], None]) -> None:
    """Nothing around the script."""
    script()


def counted(script: Callable[[], None]) -> set[str]:
    """Nothing around the script; afterwards, what Dynamo's own counters say of graph breaks and of the recompile limit."""
    script()
    from torch._dynamo.utils import counters

    limited = any(map(LIMIT.search, counters["unimplemented"]))
    found = {"compile-graph-break": bool(counters["graph_break"]), "recompile-limit": limited}
    return {name for name, present in found.items() if present}


def ids(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", TO_RUN, ids=ids)
def test_a_script_does_by_itself_what_its_header_says(case: Case, tmp_path: Path, rewrite_snapshot: bool) -> None:
    """It ends as written, and Dynamo counts what it should."""
    preload(case.imports)
    folders = iter(tmp_path / name for name in ("bare", "again"))

    def run(around: Callable[[Callable[[], None]], Any]) -> Ended:
        folder = next(folders)
        folder.mkdir()
        return run_forked(case.path, folder, around)

    ended = run(counted if case in COMPILED else bare)
    assert_ends_as_written(case, ended)
    if case in COMPILED:
        assert ended.evidence == set(case.ids) & COUNTED
    if case.healthy:
        assert_prints_no_bad_number(ended, run(bare))
    if rewrite_snapshot:
        vouch(case)


def test_only_scripts_of_the_corpus_are_vouched_for() -> None:
    """A script that was removed or renamed leaves no entry behind."""
    assert vouched()["scripts"].keys() <= {case.name for case in ALL}


def assert_ends_as_written(case: Case, ended: Ended) -> None:
    """The script raised what it says, or nothing, and printed the symptom that it says."""
    assert ended.raised == case.raises, f"{ended.raised}: {ended.message}\n{ended.output[-2000:]}"
    if case.shows is not None:
        assert re.search(case.shows, ended.output), ended.output[-2000:]


def assert_prints_no_bad_number(first: Ended, second: Ended) -> None:
    """Whatever a healthy script prints is finite, and a second run prints the same."""
    assert not re.search(r"\b(nan|inf)\b", first.output, re.IGNORECASE)
    assert TIMING.sub("", first.output) == TIMING.sub("", second.output)


def test_the_corpus_is_large_enough_and_covers_nearly_every_finding() -> None:
    """At least 75 scripts, 18 of them healthy; every family, nine findings in ten, every origin of a dtype."""
    counts = Counter(case.family for case in ALL)
    assert sum(counts.values()) >= 75
    assert counts["healthy"] >= 18
    assert set(counts) == set(FAMILIES)
    shown = {case.ids[0] for case in ALL if case.ids}
    assert shown <= set(finding_ids())
    assert len(shown) >= SHOWN * len(finding_ids()), f"no script shows {set(finding_ids()) - shown}"
    assert {born for case in ALL for born in case.born or ()} == set(BORN)


def test_a_failure_that_no_operator_shows_has_a_symptom() -> None:
    """A script that raises nothing, makes nothing non-finite and compiles nothing shows its failure by what it prints."""
    without_op = (case for case in ALL if case.family in ("scaling", "silent", "compile-load"))
    assert [case.name for case in without_op if not (case.raises or case.shows or case in COMPILED)] == []


def test_a_script_is_short_ordinary_code_that_gives_nothing_away() -> None:
    """Neither the package nor a word that names the failure occurs in the code, only in the file's name; 12 to 60 lines."""
    for case in ALL:
        words = {word.lower() for word in re.findall(r"[A-Za-z]+", case.source)}
        assert not words & set(TELLING), case.name
        lines = [line for line in case.source.splitlines() if line.strip()]
        assert 12 <= len(lines) <= 60, case.name
