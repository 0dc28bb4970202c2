"""Test runners catch what a test raises: what they report as a failed test is told, which nothing on the stack says."""

import functools
from collections.abc import Callable
from typing import Any

from dtypedoctor.worker.on_import import after_import

__all__ = ["follow_test_runners"]

Told = Callable[[BaseException], None]


def follow_test_runners(tell: Told) -> Callable[[], None]:
    """Has ``tell`` called with each exception that pytest or unittest takes for a test's failure; returns what ends that."""
    undo: list[Callable[[], None]] = []
    waiting = [
        after_import("_pytest.runner", lambda: undo.append(_follow_pytest(tell))),
        after_import("unittest.result", lambda: undo.append(_follow_unittest(tell))),
    ]

    def stop() -> None:
        for end in (*waiting, *undo):
            end()

    return stop


def _follow_pytest(tell: Told) -> Callable[[], None]:
    from _pytest.runner import CallInfo

    original = CallInfo.__dict__["from_call"]

    @functools.wraps(original.__func__)
    def from_call(cls: Any, *args: Any, **kwargs: Any) -> Any:
        result = original.__func__(cls, *args, **kwargs)
        if result.excinfo is not None:
            tell(result.excinfo.value)
        return result

    CallInfo.from_call = classmethod(from_call)  # type: ignore[assignment,method-assign]
    return lambda: setattr(CallInfo, "from_call", original)


def _follow_unittest(tell: Told) -> Callable[[], None]:
    from unittest.result import TestResult

    original = TestResult.addError

    @functools.wraps(original)
    def add_error(self: TestResult, test: Any, err: Any) -> None:
        if err[1] is not None:
            tell(err[1])
        original(self, test, err)

    TestResult.addError = add_error  # type: ignore[method-assign]
    return lambda: setattr(TestResult, "addError", original)
