"""Each script of the corpus, run bare, does what its header says; an independent witness confirms op and place."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from forked_script import Ended, run_forked
from nursery import preload
from op_witness import Account, Witnessed, watching
from script_corpus import BORN, FAMILIES, Case, cases, matches_fqn

from dtypedoctor.diagnosis.registry import finding_ids

ALL = cases()
COMPILED = [case for case in ALL if "torch.compile" in case.source]
LIBRARIES = frozenset(library for case in ALL for library in case.imports)
NOT_IN_ONE_CPU_PROCESS = {
    "stale-cuda-stream": "needs a CUDA stream",
    "patch-not-applied": "is about a correction that was asked for, which no script does",
}
COUNTED = {"compile-graph-break", "recompile-limit"}
"""Findings that Dynamo itself counts."""
OF_PRECISION = {"float16-overflow", "attention-score-overflow", "norm-square-overflow", "backward-overflow"}
TIMING = re.compile(r"(?m)^.*(it/s|s/it|examples/s|runtime).*$")
"""Lines with progress bars and timings."""
TELLING = {"overflow", "underflow", "mismatch", "stale", "bypass", "rescue", "promote", "healthy", "bug", "dtypedoctor"}


@pytest.fixture(scope="session", autouse=True)
def libraries_are_imported_once() -> None:
    """Children are forked from a process that has them, so each import is paid once."""
    preload(LIBRARIES)


def bare(script: Callable[[], None]) -> None:
    """Nothing around the script."""
    script()


def counted(script: Callable[[], None]) -> set[str]:
    """Nothing around the script; afterwards, what Dynamo's own counters say of graph breaks and of the recompile limit."""
    script()
    from torch._dynamo.utils import counters

    limited = any("recompile limit exceeded" in reason for reason in counters["unimplemented"])
    found = {"compile-graph-break": bool(counters["graph_break"]), "recompile-limit": limited}
    return {name for name, present in found.items() if present}


@pytest.fixture(scope="module")
def bare_ends(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Ended]:
    """How a script ends by itself, run once for all tests that want to know; of a compiled one, with Dynamo's counts."""

    @cache
    def ended(case: Case) -> Ended:
        return run_forked(case.path, tmp_path_factory.mktemp(case.name), counted if case in COMPILED else bare)

    return ended


def witnessed(script: Callable[[], None]) -> Account:
    """The script under the witness."""
    generation = sys.modules.get("transformers.generation.utils")
    with watching(getattr(generation, "GenerationMixin", None)) as witness:
        script()
    return witness.account()


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
def test_a_script_run_bare_ends_as_its_header_says(case: Case, bare_ends: Callable[[Case], Ended]) -> None:
    """Raises what it says or nothing, and shows its symptom in its own output."""
    assert_ends_as_written(case, bare_ends(case))


@pytest.mark.parametrize("case", COMPILED, ids=ids)
def test_dynamo_counts_what_the_header_says(case: Case, bare_ends: Callable[[Case], Ended]) -> None:
    """Dynamo's counters hold a graph break or a recompile limit exactly where the header names it."""
    assert bare_ends(case).evidence == set(case.ids) & COUNTED


@pytest.mark.parametrize("case", of("nonfinite"), ids=ids)
def test_the_first_nonfinite_value_is_born_where_the_header_says(case: Case, tmp_path: Path) -> None:
    """The witness's first record gives kind, op, module, phase and step, and whether float32 would have been finite."""
    ended = run_forked(case.path, tmp_path, witnessed)
    assert ended.raised == case.raises
    first = ended.evidence.first(*kinds_of(case))
    if first is None:  # torch refuses to write a number that the dtype cannot hold
        first = ended.evidence.first("raised")
        assert first is not None, "nothing non-finite was seen"
        assert_place(case, first)
        return
    assert first.kind == kinds_of(case)[0], first
    assert_place(case, first)
    if case.ids[0] in OF_PRECISION:
        assert first.in_float32
    elif case.ids[0] == "domain-error":
        assert not first.in_float32


@pytest.mark.parametrize("case", [case for case in of("mismatch") if case.ops], ids=ids)
def test_the_op_that_raises_is_the_one_in_the_header(case: Case, tmp_path: Path) -> None:
    """The innermost raising op or function is the header's, in the module that the header says."""
    ended = run_forked(case.path, tmp_path, witnessed)
    assert ended.raised == case.raises
    raised = ended.evidence.first("raised")
    assert case.ops is not None
    if raised is None:
        assert case.ops == (None,)
        return
    assert any(op and raised.op in (op, op.split(".")[1]) for op in case.ops), raised
    assert case.phases is None or raised.phase in case.phases, raised
    assert matches_fqn(raised.fqn, (case.raised_in,)), raised


@pytest.mark.parametrize(
    "case", [case for case in of("silent") if case.ops and any(case.ops) and case.fqns != (None,)], ids=ids
)
def test_a_silent_op_runs_in_the_module_that_the_header_names(case: Case, tmp_path: Path) -> None:
    """Each op that the header names ran directly in the forward of one of its modules."""
    ended = run_forked(case.path, tmp_path, witnessed)
    assert ended.raised == case.raises
    for op in case.ops or ():
        assert any(op == ran and matches_fqn(fqn, case.fqns) for ran, fqn in ended.evidence.ran), op


@pytest.mark.parametrize("case", of("healthy"), ids=ids)
def test_a_healthy_script_prints_no_bad_number(case: Case, bare_ends: Callable[[Case], Ended], tmp_path: Path) -> None:
    """Whatever it prints is finite, and a second run prints the same."""
    first, second = bare_ends(case).output, run_forked(case.path, tmp_path, bare).output
    assert not re.search(r"\b(nan|inf)\b", first, re.IGNORECASE)
    assert TIMING.sub("", first) == TIMING.sub("", second)


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


def test_the_corpus_is_large_enough_and_covers_every_finding() -> None:
    """At least 75 scripts, 18 of them healthy; every family, every id but those with a reason, every origin of a dtype."""
    counts = Counter(case.family for case in ALL)
    assert sum(counts.values()) >= 75
    assert counts["healthy"] >= 18
    assert set(counts) == set(FAMILIES)
    assert {case.ids[0] for case in ALL if case.ids} == set(finding_ids()) - set(NOT_IN_ONE_CPU_PROCESS)
    assert {born for case in ALL for born in case.born or ()} == set(BORN)


@pytest.mark.parametrize("case", of("scaling", "silent", "compile-load"), ids=ids)
def test_a_failure_without_an_op_to_witness_shows_a_symptom(case: Case) -> None:
    """A script that raises nothing, makes nothing non-finite and compiles nothing shows its failure by what it prints."""
    assert case.raises or case.shows or case in COMPILED


@pytest.mark.parametrize("case", ALL, ids=ids)
def test_a_script_is_short_ordinary_code_that_gives_nothing_away(case: Case) -> None:
    """Neither the package nor a word that names the failure occurs; 12 to 60 lines."""
    words = {word.lower() for word in re.findall(r"[A-Za-z]+", case.source + " " + case.name)}
    assert not words & set(TELLING)
    lines = [line for line in case.source.splitlines() if line.strip()]
    assert 12 <= len(lines) <= 60
