"""Each script of the corpus, run bare, does what its header says; an independent witness confirms op and place."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from forked_script import Ended, preload, run_forked
from op_witness import Witnessed, watching
from script_corpus import FAMILIES, Case, cases, matches_fqn

ALL = cases()
COMPILED = [case for case in ALL if "torch.compile" in case.source]
LIBRARIES = frozenset(library for case in ALL for library in case.imports)
SKIPPED_IDS = {
    "stale-cuda-stream": "needs a CUDA stream",
    "compile-only-nonfinite": "needs a compiler that changes arithmetic; the eager backend changes none",
    "patch-not-applied": "is about a correction that was asked for, which no script does",
}
KIND = {"nonfinite-input": "input", "nonfinite-parameters": "parameters"}
OF_PRECISION = {"float16-overflow", "attention-score-overflow", "norm-square-overflow", "backward-overflow"}
TELLING = "overflow underflow mismatch stale bypass rescue promote healthy trap bug broken corrupt dtypedoctor".split()


@pytest.fixture(scope="session", autouse=True)
def libraries_are_imported_once() -> None:
    """Children are forked from here, so each import is paid once."""
    preload(LIBRARIES)


def bare(script: Callable[[], None]) -> None:
    """Nothing around the script."""
    script()


def compiled(script: Callable[[], None]) -> set[str]:
    """The script, then what Dynamo's own counters say of graph breaks and of the recompile limit."""
    from torch._dynamo.utils import counters

    script()
    limited = any("recompile limit exceeded" in reason for reason in counters["unimplemented"])
    found = {"compile-graph-break": bool(counters["graph_break"]), "recompile-limit": limited}
    return {name for name, present in found.items() if present}


def witnessed(script: Callable[[], None]) -> list[Witnessed]:
    """The script under the witness."""
    generation = sys.modules.get("transformers.generation.utils")
    with watching(generation and generation.GenerationMixin) as witness:
        script()
    stepped = witness.place.steps_done > 0
    return [record.by_step(stepped) for record in witness.seen]


def ids(case: Case) -> str:
    """Name of a case in test ids."""
    return case.name


def of(*families: str) -> list[Case]:
    """Cases of some families."""
    return [case for case in ALL if case.family in families]


def assert_ends_as_written(case: Case, ended: Ended) -> None:
    """The script raised what it says, or nothing, and printed the symptom that it says."""
    assert ended.raised == case.raises, f"{ended.raised}: {ended.message}\n{ended.output[-2000:]}"
    if case.shows is not None:
        assert re.search(case.shows, ended.output), ended.output[-2000:]


@pytest.mark.parametrize("case", ALL, ids=ids)
def test_a_script_run_bare_ends_as_its_header_says(case: Case, tmp_path: Path) -> None:
    """Raises what it says or nothing, and shows its symptom in its own output."""
    assert_ends_as_written(case, run_forked(case.path, tmp_path, bare))


@pytest.mark.parametrize("case", COMPILED, ids=ids)
def test_dynamo_counts_what_the_header_says(case: Case, tmp_path: Path) -> None:
    """Dynamo's counters hold a graph break or a recompile limit exactly where the header names it."""
    assert run_forked(case.path, tmp_path, compiled).evidence == set(case.ids)


@pytest.mark.parametrize("case", of("nonfinite"), ids=ids)
def test_the_first_nonfinite_value_is_born_where_the_header_says(case: Case, tmp_path: Path) -> None:
    """The witness's first record gives kind, op, module, phase and step."""
    ended = run_forked(case.path, tmp_path, witnessed)
    unseen_by_modules = case.ids == ("nonfinite-input",) and case.fqns == (None,)
    kinds = {"consumed"} if unseen_by_modules else {"birth", "input", "parameters"}
    first = next((seen for seen in ended.evidence if seen.kind in kinds), None)
    assert first is not None, "nothing non-finite was seen"
    if not unseen_by_modules:
        assert first.kind == KIND.get(case.ids[0], "birth"), first
    assert_place(case, first)
    if case.ids[0] in OF_PRECISION:
        assert first.in_float32
    elif case.ids[0] == "domain-error":
        assert not first.in_float32


@pytest.mark.parametrize("case", [case for case in of("mismatch") if case.ops], ids=ids)
def test_the_op_that_raises_is_the_one_in_the_header(case: Case, tmp_path: Path) -> None:
    """The innermost raising op or function is the header's, in the module that the header says."""
    ended = run_forked(case.path, tmp_path, witnessed)
    raised = next((seen for seen in ended.evidence if seen.kind == "raised"), None)
    assert case.ops is not None
    if case.ops == (None,):
        assert raised is None
        return
    assert raised is not None
    assert any(op and raised.op in (op, op.split(".")[1]) for op in case.ops), raised
    assert case.phases is None or raised.phase in case.phases, raised
    assert matches_fqn(raised.fqn, (case.raised_in,)), raised


def assert_place(case: Case, seen: Witnessed) -> None:
    """Op, phase, step and, where the witness can tell, module are the header's."""
    assert case.ops is None or seen.op in case.ops, seen
    assert case.phases is None or seen.phase in case.phases, seen
    assert case.step is None or seen.step == case.step, seen
    if seen.phase != "optimizer":
        assert matches_fqn(seen.fqn, case.fqns), seen


def test_the_corpus_is_large_enough_and_covers_every_family() -> None:
    """At least 75 scripts, 18 of them healthy, and every family present."""
    counts = Counter(case.family for case in ALL)
    assert sum(counts.values()) >= 75
    assert counts["healthy"] >= 18
    assert set(counts) == set(FAMILIES)


@pytest.mark.parametrize("case", of("scaling", "silent", "compile-load"), ids=ids)
def test_a_failure_without_an_op_to_witness_shows_a_symptom(case: Case) -> None:
    """A script that raises nothing, makes nothing non-finite and compiles nothing shows its failure by what it prints."""
    assert case.raises or case.shows or case in COMPILED


@pytest.mark.parametrize("case", ALL, ids=ids)
def test_a_script_is_short_ordinary_code_that_gives_nothing_away(case: Case) -> None:
    """No import of the package, no word that names the failure, 15 to 60 lines."""
    words = {word.lower() for word in re.findall(r"[A-Za-z]+", case.source + " " + case.name)}
    assert not words & set(TELLING)
    lines = [line for line in case.source.splitlines() if line.strip()]
    assert 12 <= len(lines) <= 60
    imported = {alias.name for node in ast.walk(ast.parse(case.source)) if isinstance(node, ast.Import) for alias in node.names}
    assert "dtypedoctor" not in imported
