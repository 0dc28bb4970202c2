"""Each script of the corpus, run bare, does what its header says; an independent witness confirms op and place.

This tests the corpus and not the product, so a script for which `vouched.json` holds its hash under the installed torch is not run
again. After a change of a script::

    python -m pytest -q tests/e2e/test_scripts_fail_as_written.py --rewrite-snapshot

Before a release (``-m release``) all of them are run.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked_script import Ended, run_forked
from nursery import preload
from op_witness import Account, Witnessed, watching
from script_corpus import BORN, FAMILIES, Case, cases, matches_fqn
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
OF_PRECISION = {"float16-overflow", "attention-score-overflow", "norm-square-overflow", "backward-overflow"}
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


def witnessed(script: Callable[[], None]) -> Account:
    generation = sys.modules.get("transformers.generation.utils")
    with watching(getattr(generation, "GenerationMixin", None)) as witness:
        script()
    return witness.account()


def ids(case: Case) -> str:
    return case.name


@pytest.mark.parametrize("case", TO_RUN, ids=ids)
def test_a_script_does_by_itself_what_its_header_says(case: Case, tmp_path: Path, rewrite_snapshot: bool) -> None:
    """It ends as written, Dynamo counts what it should, and the witness saw what the header of its family names."""
    preload(case.imports)
    folders = iter(tmp_path / name for name in ("bare", "again", "witnessed"))

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
    if (assert_seen := WITNESSED.get(case.family)) is not None and is_witnessed(case):
        seen = run(witnessed)
        assert seen.raised == case.raises
        assert_seen(case, seen.evidence)
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


def is_witnessed(case: Case) -> bool:
    """Whether the header names something that an operator's record can confirm."""
    if case.family == "silent":
        return case.ops is not None and any(case.ops) and case.fqns != (None,)
    return case.family == "nonfinite" or bool(case.ops)


def assert_birth(case: Case, account: Account) -> None:
    """The witness's first record gives kind, op, module, phase and step, and whether float32 would have been finite."""
    first = account.first(*kinds_of(case))
    if first is None:  # torch refuses to write a number that the dtype cannot hold
        first = account.first("raised")
        assert first is not None, "nothing non-finite was seen"
        assert_place(case, first)
        return
    assert first.kind == kinds_of(case)[0], first
    assert_place(case, first)
    if case.ids[0] in OF_PRECISION:
        assert first.in_float32
    elif case.ids[0] == "domain-error":
        assert not first.in_float32


def assert_raised(case: Case, account: Account) -> None:
    """The innermost raising op or function is the header's, in the module that the header says."""
    raised = account.first("raised")
    assert case.ops is not None
    if raised is None:
        assert case.ops == (None,)
        return
    assert any(op and raised.op in (op, op.split(".")[1]) for op in case.ops), raised
    assert case.phases is None or raised.phase in case.phases, raised
    assert matches_fqn(raised.fqn, (case.raised_in,)), raised


def assert_ran(case: Case, account: Account) -> None:
    """Each op that the header names ran directly in the forward of one of its modules."""
    for op in case.ops or ():
        assert any(op == ran and matches_fqn(fqn, case.fqns) for ran, fqn in account.ran), op


WITNESSED: dict[str, Callable[[Case, Account], None]] = {
    "nonfinite": assert_birth,
    "mismatch": assert_raised,
    "silent": assert_ran,
}
"""What the witness has to have seen, by family."""


def kinds_of(case: Case) -> tuple[str, ...]:
    """Kinds of record that may come first, the expected one foremost."""
    if case.ids[0] == "nonfinite-input" and case.fqns == (None,):
        return ("consumed",)  # no module ever sees it
    expected = {"nonfinite-input": "input", "nonfinite-parameters": "parameters"}.get(case.ids[0], "birth")
    return (expected, *({"birth", "input", "parameters"} - {expected}))


def assert_place(case: Case, seen: Witnessed) -> None:
    """Op, phase, step and, where the witness can tell, module are the header's."""
    assert case.ops is None or seen.op in case.ops, seen
    assert case.phases is None or seen.phase in case.phases, seen
    assert case.step is None or seen.step == case.step, seen
    if seen.phase != "optimizer":
        assert matches_fqn(seen.fqn, case.fqns), seen


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


def test_a_failure_without_an_op_to_witness_shows_a_symptom() -> None:
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
