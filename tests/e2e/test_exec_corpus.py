"""Every script of the corpus under the whole diagnosis: the first finding is the header's, and healthy scripts stay silent."""

from pathlib import Path

import pytest
from command import dtypedoctor, report_of
from exec_corpus import diagnose_case, expected
from nursery import preload
from recorded import keep
from script_corpus import Case, cases
from snapshot import check_against_snapshot, entry, forget_others, read_snapshot

CASES = cases()
FAILING = [case for case in CASES if not case.healthy]
HEALTHY = [case for case in CASES if case.healthy]
BY_COMMAND = ("graph_break_branch_on_value", "healthy_close_to_float16_max", "update_stall_weights_near_one")
"""Scripts that are diagnosed by the real command line too, in an interpreter of their own."""


def _one_for_each_finding() -> list[Case]:
    """The first script for each finding id, where possible one that imports torch alone: the others take seconds more."""
    chosen: dict[str, Case] = {}
    for case in sorted(FAILING, key=lambda case: len(case.imports)):
        chosen.setdefault(case.ids[0], case)
    return list(chosen.values())


ALWAYS = [*_one_for_each_finding(), *HEALTHY[::2]]
"""What is diagnosed by default; the others are before a release. `tests/unit/test_recorded.py` replays the traces of all of them."""


@pytest.fixture(scope="session", autouse=True)
def libraries_are_imported_once() -> None:
    """Children are forked from a process that has them, so each import is paid once."""
    preload(frozenset(library for case in CASES for library in case.imports))


def ids(case: Case) -> str:
    return case.name


@pytest.mark.parametrize(
    "case", [case if case in ALWAYS else pytest.param(case, marks=pytest.mark.release) for case in CASES], ids=ids
)
def test_a_script_gets_the_findings_of_its_header_and_of_the_snapshot(
    case: Case, tmp_path: Path, rewrite_snapshot: bool
) -> None:
    """First the header's: id, module, op, phase, step and end. Then all in their order, the status and the exit code; a healthy script has none."""
    done = diagnose_case(case, tmp_path)
    assert not done.wrong, f"{'; '.join(done.wrong)}\nwanted {expected(case)}\nfound  {done.found}"
    check_against_snapshot("scripts", case.name, done.entry, rewrite=rewrite_snapshot)
    if rewrite_snapshot:
        keep(case.name, tmp_path)


def test_the_snapshot_holds_no_other_script(rewrite_snapshot: bool) -> None:
    """A script that was removed or renamed leaves no entry behind."""
    names = {case.name for case in CASES}
    if rewrite_snapshot:
        forget_others("scripts", names)
    assert read_snapshot()["scripts"].keys() <= names


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("case", [case for case in CASES if case.name in BY_COMMAND], ids=ids)
def test_the_command_line_says_the_same(case: Case, tmp_path: Path) -> None:
    """A fresh interpreter finds first what the fork found first, as surely and at the same place, and exits as it should."""
    finished = dtypedoctor("exec", "--out", tmp_path / "run", case.path, cwd=tmp_path, OMP_NUM_THREADS="1")
    found = entry(report_of(tmp_path / "run"), finished.code)
    known = read_snapshot()["scripts"][case.name]
    assert (found["exit"], found["status"]) == (known["exit"], known["status"])
    assert found["findings"][:1] == known["findings"][:1]
