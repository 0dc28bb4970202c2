"""Follows pytest, unittest and doctest: which exceptions fail a test, and what is not finite because a test expects it."""

import re
import sys
from collections.abc import Callable
from functools import partial, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dtypedoctor.worker.on_import import after_import

if TYPE_CHECKING:
    from doctest import DocTestRunner, Example

__unittest = True
"""unittest leaves frames of such a module out of the tracebacks that it shows."""

_NOT_FINITE = re.compile(r"\b(nan|inf)\b")
_EXPECTING = ("_pytest.raises", "_pytest.python_api", "unittest.case")
"""Hold the classes of what ``pytest.raises`` and ``assertRaises`` return; the second does for pytest before 8.4."""
Undo = Callable[[], None]


class TestRunners:
    """Tells how tests end.

    Args:
        now: gives the number of the next record.
        failed: is called with each exception that a runner takes for a test's failure.
        passed: is called where a test, or a part of one, has ended as it should, with the number of a record before it began and whether that part
            is what the test expects: an exception, or an output that names inf or NaN.
    """

    def __init__(
        self, now: Callable[[], int], failed: Callable[[BaseException], None], passed: Callable[[int, bool], None]
    ) -> None:
        self._now, self._failed, self._passed = now, failed, passed
        self._began: dict[int, int] = {}
        """The number of a record before what is going on began, by the identity of the context, result or runner that ends it."""
        self._undo: list[Undo] = []

    def follow(self) -> Undo:
        """Follows those that the program imports; returns what ends that."""
        waiting = [
            after_import("_pytest.runner", self._follow_pytest),
            after_import("unittest.result", self._follow_unittest),
            after_import("doctest", lambda: self._follow_doctest(sys.modules["doctest"])),
            *(after_import(name, partial(self._follow_expected_errors, name)) for name in _EXPECTING),
        ]

        main = sys.modules["__main__"]
        if getattr(main.__spec__, "name", "") == "doctest":  # of `python -m doctest`, whose classes no import brings
            self._follow_doctest(main)

        def stop() -> None:
            for end in (*waiting, *self._undo):
                end()

        return stop

    def _ended(self, what: object, *, expects: bool) -> None:
        began = self._began.pop(id(what), None)  # None where it began before it was followed
        if began is not None:
            self._passed(began, expects)

    def _replace(self, owner: type, name: str, make: Callable[[Any], Any]) -> None:
        original = owner.__dict__[name]
        setattr(owner, name, wraps(original)(make(original)))
        self._undo.append(lambda: setattr(owner, name, original))

    def _follow_pytest(self) -> None:
        from _pytest.runner import CallInfo

        original = CallInfo.__dict__["from_call"]

        @wraps(original.__func__)
        def from_call(cls: Any, *args: Any, **kwargs: Any) -> Any:
            began = self._now()
            result = original.__func__(cls, *args, **kwargs)
            if result.excinfo is not None:
                self._failed(result.excinfo.value)
            else:
                self._passed(began, False)
            return result

        CallInfo.from_call = classmethod(from_call)  # type: ignore[assignment,method-assign]
        self._undo.append(lambda: setattr(CallInfo, "from_call", original))

    def _follow_unittest(self) -> None:
        from unittest.result import TestResult

        def failing(original: Callable[..., None]) -> Callable[..., None]:
            def add(result: TestResult, *args: Any) -> None:
                error = args[-1][1] if args and args[-1] is not None else None  # None of a part of a test that passes
                if error is not None:
                    self._failed(error)
                original(result, *args)

            return add

        def starting(original: Callable[..., None]) -> Callable[..., None]:
            def start(result: TestResult, *args: Any) -> None:
                self._began[id(result)] = self._now()
                original(result, *args)

            return start

        def passing(original: Callable[..., None]) -> Callable[..., None]:
            def add(result: TestResult, *args: Any) -> None:
                self._ended(result, expects=False)
                original(result, *args)

            return add

        for name in ("addError", "addFailure", "addSubTest"):
            self._replace(TestResult, name, failing)
        self._replace(TestResult, "startTest", starting)
        self._replace(TestResult, "addSuccess", passing)

    def _follow_expected_errors(self, module: str) -> None:
        """Follows `pytest.raises` or `assertRaises`: what lies inside is expected where they take an exception."""

        def entering(original: Callable[..., Any]) -> Callable[..., Any]:
            def enter(context: Any) -> Any:
                self._began[id(context)] = self._now()
                return original(context)

            return enter

        def leaving(original: Callable[..., Any]) -> Callable[..., Any]:
            def leave(context: Any, *raised: Any) -> Any:
                __tracebackhide__ = True  # of pytest
                taken = original(context, *raised)
                if taken and raised[0] is not None:
                    self._ended(context, expects=True)
                return taken

            return leave

        classes = [value for value in vars(sys.modules[module]).values() if isinstance(value, type)]
        for expected in classes:
            if expected.__module__ == module and {"__enter__", "__exit__"} <= expected.__dict__.keys():
                self._replace(expected, "__enter__", entering)
                self._replace(expected, "__exit__", leaving)

    def _follow_doctest(self, doctest: ModuleType) -> None:
        def starting(original: Callable[..., None]) -> Callable[..., None]:
            def start(runner: "DocTestRunner", out: Any, test: Any, example: "Example") -> None:
                self._began[id(runner)] = self._now()
                original(runner, out, test, example)

            return start

        def passing(original: Callable[..., None]) -> Callable[..., None]:
            def succeed(runner: "DocTestRunner", out: Any, test: Any, example: "Example", got: str) -> None:
                expects = example.exc_msg is not None or _NOT_FINITE.search(example.want) is not None
                self._ended(runner, expects=expects)
                original(runner, out, test, example, got)

            return succeed

        self._replace(doctest.DocTestRunner, "report_start", starting)
        self._replace(doctest.DocTestRunner, "report_success", passing)
