"""Every script of the corpus under the whole diagnosis: the first finding is the header's, and healthy scripts stay silent."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from command import dtypedoctor, report_of
from exec_corpus import Diagnosed, diagnose_case, expected
from nursery import preload
from script_corpus import Case, cases
from snapshot import check_against_snapshot, entry, forget_others, read_snapshot

ENABLED_FAMILIES = ("healthy", "mismatch", "nonfinite", "scaling", "silent", "compile-load")
"""Families whose detectors are all there."""

CASES = [case for case in cases() if case.family in ENABLED_FAMILIES]

BY_COMMAND = {
    "backward_overflow_large_weights": (),
    "domain_error_log_negative": pytest.mark.soak,
    "graph_break_branch_on_value": (),
    "healthy_close_to_float16_max": (),
    "healthy_region_per_forward": pytest.mark.soak,
    "no_inf_checks_replaced_output_layer": pytest.mark.soak,
    "norm_promotes_rms_float32_weight": (),
    "adapter_dtype_float32_branch": pytest.mark.soak,
    "overflow_residual_sum": pytest.mark.soak,
    "stale_cache_region_around_loop": pytest.mark.soak,
    "unscale_float16_whole_model_half": (),
    "update_stall_weights_near_one": (),
}
"""Scripts which need torch only, through the real command line: one of each family, the others with ``-m soak``."""


@pytest.fixture(scope="session", autouse=True)
def libraries_are_imported_once() -> None:
    """Children are forked from a process that has them, so each import is paid once."""
    preload(frozenset(library for case in CASES for library in case.imports))


def ids(case: Case) -> str:
    """Name of a case in test ids."""
    return case.name


@pytest.fixture(scope="session")
def diagnosed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Diagnosed]:
    """A script after its treatment, which is made once for all tests that want to know."""
    return cache(lambda case: diagnose_case(case, tmp_path_factory.mktemp(case.name)))


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_first_finding_is_the_one_in_the_header(case: Case, diagnosed: Callable[[Case], Diagnosed]) -> None:
    """Id, module, op, phase, step and end; nothing but information for a healthy script."""
    done = diagnosed(case)
    assert not done.wrong, f"{'; '.join(done.wrong)}\nwanted {expected(case)}\nfound  {done.found}"


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_all_findings_are_those_of_the_snapshot(
    case: Case, diagnosed: Callable[[Case], Diagnosed], rewrite_snapshot: bool
) -> None:
    """All findings in their order, with severity, confidence and place, the status and the exit code."""
    check_against_snapshot("scripts", case.name, diagnosed(case).entry, rewrite=rewrite_snapshot)


def test_the_snapshot_holds_no_other_script(rewrite_snapshot: bool) -> None:
    """A script that was removed or renamed leaves no entry behind."""
    names = {case.name for case in CASES}
    if rewrite_snapshot:
        forget_others("scripts", names)
    assert read_snapshot()["scripts"].keys() <= names


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=BY_COMMAND[case.name]) for case in CASES if case.name in BY_COMMAND], ids=ids
)
def test_the_command_line_says_the_same(case: Case, tmp_path: Path) -> None:
    """A fresh interpreter finds first what the fork found first, as surely and at the same place, and exits as it should."""
    finished = dtypedoctor("exec", "--out", tmp_path / "run", case.path, cwd=tmp_path, OMP_NUM_THREADS="1")
    found = entry(report_of(tmp_path / "run"), finished.code)
    known = read_snapshot()["scripts"][case.name]
    assert (found["exit"], found["status"]) == (known["exit"], known["status"])
    assert found["findings"][:1] == known["findings"][:1]
