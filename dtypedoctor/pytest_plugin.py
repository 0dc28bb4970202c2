"""``pytest --dtypedoctor``: watches each test, and puts the findings into the report of a test that fails.

pytest imports this module wherever dtypedoctor is installed, so nothing of the package is imported before a test is to be watched.
"""

from __future__ import annotations

import itertools
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from dtypedoctor.inprocess import WatchReport

MARKER = "no_dtype_findings"
_PROPERTY = "dtypedoctor"
_REPORT: pytest.StashKey[WatchReport | None] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--dtypedoctor``, and where the run directories go."""
    group = parser.getgroup("dtypedoctor", "mixed-precision failures")
    group.addoption(
        "--dtypedoctor", action="store_true", help="watch each test; a test that fails shows the findings in its report"
    )
    group.addoption("--dtypedoctor-out", metavar="DIR", help="keep the run directory of each watched test in DIR")


def pytest_configure(config: pytest.Config) -> None:
    """Makes the marker known, for ``--strict-markers``."""
    about = f"{MARKER}(*allowed): fail on findings of dtypedoctor whose ids are not allowed"
    config.addinivalue_line("markers", about)


@pytest.fixture
def no_dtype_findings() -> None:
    """Watches the test, and fails it on any finding of dtypedoctor; the marker of the same name allows ids."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Watches the test itself, without its setup and teardown.

    Raises:
        pytest.fail.Exception: the test must have no findings, and has some or ran nothing that could be measured.
    """
    marker = item.get_closest_marker(MARKER)
    must_be_clean = marker is not None or MARKER in getattr(item, "fixturenames", ())
    if not must_be_clean and not item.config.getoption("--dtypedoctor"):
        return (yield)
    from dtypedoctor.inprocess import Watched, watched_for
    from dtypedoctor.interruptions import noticing

    if watched_for() is not None:
        return (yield)
    kept = item.config.getoption("--dtypedoctor-out")
    with tempfile.TemporaryDirectory(prefix="dtypedoctor-") as folder:
        # a directory for a test that does not exist yet; a test may run several times
        parent = Path(kept or folder)
        parent.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", item.nodeid)[-150:].strip("-.")
        names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
        watched = Watched(next(parent / each for each in names if not (parent / each).exists()), quiet=True)
        watched.begin(None)
        raised: list[BaseException] = []
        try:
            with noticing(raised.append):
                result = yield
        finally:
            watched.end(raised[0] if raised else None)
            item.stash[_REPORT] = watched.report
    if must_be_clean:
        _check(watched.report, allowed=marker.args if marker is not None else ())
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Notes the ids of the findings with the report, and adds a section to that of a failed test."""
    report: pytest.TestReport = yield  # type: ignore[assignment]
    found = item.stash.get(_REPORT, None)
    if call.when == "call" and found is not None and found.findings:
        report.user_properties.append((_PROPERTY, ", ".join(finding.id for finding in found.findings)))
        if report.failed:
            report.sections.append(("dtypedoctor", _text(found)))
    return report  # type: ignore[return-value]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Names the tests that passed although something was found in them."""
    silent = [(report.nodeid, dict(report.user_properties)) for report in terminalreporter.getreports("passed")]
    lines = [f"{name}: {properties[_PROPERTY]}" for name, properties in silent if _PROPERTY in properties]
    if lines:
        terminalreporter.section("dtypedoctor: passed with findings")
        for line in lines:
            terminalreporter.line(line)


def _check(report: WatchReport | None, allowed: tuple[str, ...]) -> None:
    """Fails the test on findings that are not allowed, and where nothing can be said."""
    if report is None:
        pytest.fail("dtypedoctor: no report could be written", pytrace=False)
    if any(finding.id not in allowed for finding in report.findings):
        pytest.fail(_text(report), pytrace=False)
    if report.status == "unknown":
        pytest.fail(f"dtypedoctor: {_text(report)}", pytrace=False)


def _text(report: WatchReport) -> str:
    """What was found, without what must not stand in a log that others read."""
    return "\n".join(report.lines())
