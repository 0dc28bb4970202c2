"""Every script of the corpus under the whole diagnosis: the first finding is the header's, and healthy scripts stay silent."""

from pathlib import Path

import pytest
from command import dtypedoctor, report_of
from exec_corpus import diagnose_case, expected
from nursery import preload
from script_corpus import Case, cases, matches_fqn

ENABLED_FAMILIES = ("healthy", "mismatch", "nonfinite", "scaling", "silent", "compile-load")
"""Families whose detectors are all there."""

CASES = [case for case in cases() if case.family in ENABLED_FAMILIES]

BY_COMMAND = ("rain_gauge", "bedtime_stories", "handwritten_digits", "pendulum_fit", "signature_check", "bird_calls")
"""One script of each family that needs torch only, through the real command line."""


@pytest.fixture(scope="session", autouse=True)
def libraries_are_imported_once() -> None:
    """Children are forked from a process that has them, so each import is paid once."""
    preload(frozenset(library for case in CASES for library in case.imports))


def ids(case: Case) -> str:
    """Name of a case in test ids."""
    return case.name


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_first_finding_is_the_one_in_the_header(case: Case, tmp_path: Path) -> None:
    """Id, module, op, phase, step and end; nothing but information for a healthy script."""
    done = diagnose_case(case, tmp_path)
    assert not done.wrong, f"{'; '.join(done.wrong)}\nwanted {expected(case)}\nfound  {done.found}"


@pytest.mark.parametrize("case", [case for case in CASES if case.name in BY_COMMAND], ids=ids)
def test_the_command_line_says_the_same(case: Case, tmp_path: Path) -> None:
    """A fresh interpreter finds what the fork found, and exits as it should."""
    finished = dtypedoctor("exec", "--out", tmp_path / "run", case.path, cwd=tmp_path, OMP_NUM_THREADS="1")
    report = report_of(tmp_path / "run")
    if case.healthy:
        assert (finished.code, report["status"]) == (0, "healthy"), report["headline"]
        return
    assert finished.code == 10
    first = report["findings"][0]
    assert first["id"] in case.ids
    assert matches_fqn(first["fqn"], case.fqns)
    assert case.step is None or first["step"] == case.step
