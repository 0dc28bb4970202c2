"""What a bisection was asked for can be read back from its run directory, or is refused in one message."""

from pathlib import Path

import pytest

from dtypedoctor.errors import UsageError
from dtypedoctor.lab.bisect.measurements import JOURNAL, Asked, Journal
from dtypedoctor.lab.scenarios.loading import case_of


def test_what_was_asked_for_is_read_back(tmp_path: Path) -> None:
    """Whatever was noted since."""
    asked = Asked(scenario=case_of("builtin:gemma4-tiny", "float16"), tolerance=0.25)
    Journal(tmp_path).begin(asked)
    Journal(tmp_path).note("probe", outcome="pass", absmax=None)
    assert Journal(tmp_path).asked() == asked


def test_a_torn_last_line_does_no_harm(tmp_path: Path) -> None:
    """As a power cut leaves it."""
    asked = Asked(scenario=case_of("builtin:llama-tiny", "bfloat16"), tolerance=None)
    Journal(tmp_path).begin(asked)
    with (tmp_path / JOURNAL).open("a") as file:
        file.write('{"event":"pro')
    assert Journal(tmp_path).asked() == asked


def test_a_log_is_begun_once(tmp_path: Path) -> None:
    """Two bisections never share a directory."""
    asked = Asked(scenario=case_of("builtin:llama-tiny", "float16"), tolerance=None)
    Journal(tmp_path).begin(asked)
    with pytest.raises(FileExistsError):
        Journal(tmp_path).begin(asked)


@pytest.mark.parametrize(
    "content", ["", "no JSON\n", "[]\n", '{"schema": 1}\n', '{"schema": 1, "scenario": {}, "tolerance": 0}\n']
)
def test_a_directory_without_a_readable_log_is_refused(tmp_path: Path, content: str) -> None:
    """With what to give instead."""
    (tmp_path / JOURNAL).write_text(content)
    with pytest.raises(UsageError, match="no bisection to resume") as refused:
        Journal(tmp_path).asked()
    assert "--resume" in refused.value.hint
    with pytest.raises(UsageError, match="no bisection to resume"):
        Journal(tmp_path / "elsewhere").asked()


def test_a_log_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    """Instead of being read wrongly."""
    (tmp_path / JOURNAL).write_text('{"schema": 2}\n')
    with pytest.raises(UsageError, match="newer version"):
        Journal(tmp_path).asked()
