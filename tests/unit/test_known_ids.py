"""An id in a scenario that nothing has is a mistake in its place, for every verb that reads scenarios."""

import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE
from scenario_files import HEALTHY, written

from dtypedoctor.errors import UsageError
from dtypedoctor.lab.cli.scenario_files import load_checked
from dtypedoctor.lab.scenarios.loading import available

UNKNOWN = HEALTHY + (
    "expect: {findings: [float16-overflw], cured_by: [bfloat61], not_cured_by: [stirct]}\n"
    "remedies: [stirct]\n"
    "corrections: [{id: keep-flot32}]\n"
)
PLACES = [
    "7:21: expect.findings[0]: no finding has the id 'float16-overflw'; did you mean 'float16-overflow'?",
    "7:50: expect.cured_by[0]: no remedy has the id 'bfloat61'; did you mean 'bfloat16'?",
    "7:76: expect.not_cured_by[0]: no remedy has the id 'stirct'; did you mean 'strict'?",
    "8:12: remedies[0]: no remedy has the id 'stirct'; did you mean 'strict'?",
    "9:16: corrections[0].id: no correction has the id 'keep-flot32'; did you mean 'keep-float32'?",
]


@pytest.mark.release(all_but=1)
@pytest.mark.slow
@pytest.mark.parametrize("verb", ["run", "bisect"])
def test_unknown_ids_end_a_command_before_anything_runs(verb: str, tmp_path: Path) -> None:
    """Exit 2 with file, line, column and what may be meant; no run directory is made."""
    path = written(tmp_path, UNKNOWN)
    command = [sys.executable, "-m", "dtypedoctor", verb, str(path), "--out", str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert ended.returncode == 2
    assert [line.removeprefix(f"{path}:") for line in ended.stderr.splitlines()[1 : 1 + len(PLACES)]] == PLACES
    assert not (tmp_path / "out").exists()


def test_shipped_scenarios_name_only_what_there_is() -> None:
    """Each is loaded as the verbs load it."""
    for path in available():
        try:
            load_checked(path, allow_code=False)
        except UsageError as error:
            pytest.fail(error.message)
