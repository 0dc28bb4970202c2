"""Programs that catch what torch raises, or fail without a word, run by `exec`: a test runner, a guard that leaves with a status, a finite loss."""

import textwrap
from pathlib import Path

import pytest
from command import dtypedoctor as in_a_new_process
from command import forked as dtypedoctor
from command import report_of

TESTS = """
    import pytest, torch
    from torch import nn

    def test_an_error_is_expected():
        with pytest.raises(RuntimeError):
            nn.Linear(2, 2).half()(torch.ones(1, 2))

    def test_training():
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
        model(torch.ones(1, 2)).sum().backward()

    def test_another_model_trains():
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
"""
GUARD = """
    import sys, torch
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).bfloat16())
    try:
        model(torch.ones(1, 2))
    except RuntimeError as error:
        print("training failed:", error)
        sys.exit(1)
"""
UNITTEST = """
    import unittest, torch
    from torch import nn

    class Overflows(unittest.TestCase):
        def test_an_error_is_expected(self):
            with self.assertRaises(RuntimeError):
                nn.Linear(2, 2)(torch.ones(1, 2).double())

        def test_a_sum(self):
            x = torch.full((4,), {value}, dtype=torch.float16)
            self.assertLess((x * x).sum().item(), 2e3)

    unittest.main()
"""


@pytest.mark.release
def test_a_dtype_error_in_a_test_is_found_under_pytest(tmp_path: Path) -> None:
    """The failing test's error is explained by an op trace; the one that a test expects is not a finding."""
    (tmp_path / "test_it.py").write_text(textwrap.dedent(TESTS))
    done = dtypedoctor(
        "exec", "--once", "--out", "run", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py", cwd=tmp_path
    )
    report = report_of(tmp_path / "run")
    assert (done.code, report["status"]) == (10, "findings"), done.err
    (finding,) = report["findings"]
    assert (finding["id"], finding["confidence"]) == ("operand-dtype-mismatch", "proven")
    assert "bfloat16" in finding["summary"]
    assert finding["source"] is not None
    assert finding["summary"].endswith("was caught by the program.")
    assert report["before"]["ended"] == "ended with status 1"


def test_a_guard_that_prints_and_leaves_is_looked_behind(tmp_path: Path) -> None:
    """`sys.exit(1)` in an except clause ends with what was caught as the finding."""
    (tmp_path / "train.py").write_text(textwrap.dedent(GUARD))
    done = dtypedoctor("exec", "--once", "--out", "run", "train.py", cwd=tmp_path)
    report = report_of(tmp_path / "run")
    assert (done.code, report["findings"][0]["id"]) == (10, "operand-dtype-mismatch"), done.err
    assert "was caught by the program" in done.out + done.err


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(
    ("value", "said"), [(300.0, "FOUND: float16 overflow"), (30.0, "ERROR: The run failed; nothing")]
)
def test_only_what_fails_in_a_test_is_told_where_another_test_expects_an_error(
    value: float, said: str, tmp_path: Path
) -> None:
    """An assertion that fails has not accepted the inf that it was shown, whatever runs the tests."""
    (tmp_path / "test_it.py").write_text(textwrap.dedent(UNITTEST.format(value=value)))
    done = dtypedoctor("exec", "--once", "--out", "run", "test_it.py", cwd=tmp_path)
    assert f"\n{said}" in f"\n{done.out}{done.err}"
    assert done.code == 10


EXPECTED = {
    "doctest": (
        """
    >>> square(torch.tensor([300.0]).half())
    tensor([{inf}], dtype=torch.float16)
    >>> square(torch.tensor([300.0]).half()).item()
    {inf}
    """,
        ("test_it.py",),
    ),
    "doctest by command": (
        """
    >>> loss = net(torch.full((1, 2), 300.0).half()).sum(); loss.backward(); loss
    tensor({inf}, dtype=torch.float16, grad_fn=<SumBackward0>)
    """,
        ("-m", "doctest", "test_it.py"),
    ),
    "pytest": (
        """
    def test_is_refused():
        with pytest.raises(OverflowError):
            checked(torch.full((3,), 300.0).half())

    def test_is_infinite():
        out = square(torch.full((3,), 300.0).half())
        assert out.tolist() == [math.{inf}] * 3
    """,
        ("-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"),
    ),
    "unittest": (
        """
    class Squares(unittest.TestCase):
        def test_is_refused(self):
            with self.assertRaises(OverflowError):
                checked(torch.full((3,), 300.0).half())

        def test_is_infinite(self):
            out = square(torch.full((3,), 300.0).half())
            self.assertEqual(float(out[0]), math.{inf})
    """,
        ("-m", "unittest", "test_it.py"),
    ),
}
SQUARES = """
import math, sys, unittest
import pytest, torch

net = torch.nn.Linear(2, 2).half()
torch.nn.init.constant_(net.weight, 300.0)

def square(x):
    return x * x

def checked(x):
    if not torch.isfinite(square(x)).all():
        raise OverflowError("not finite")
"""


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize(("inf", "code"), [("inf", 0), ("pi", 10)])
@pytest.mark.parametrize("runner", EXPECTED)
def test_an_infinity_that_a_test_expects_is_none_of_its_failures(
    runner: str, inf: str, code: int, tmp_path: Path
) -> None:
    """In the output of a doctest, in an assertion, or before an exception that is expected; a test that expects another value fails, and is explained."""
    tests, arguments = EXPECTED[runner]
    tests = textwrap.dedent(tests.format(inf=inf))
    runs = "\nimport doctest\ndoctest.testmod(raise_on_error=True)" if runner == "doctest" else ""
    ending = f"__doc__ = r'''{tests}'''{runs}" if "doctest" in runner else tests
    (tmp_path / "test_it.py").write_text(f"{SQUARES}\n{ending}\n")
    start = in_a_new_process if arguments[:2] == ("-m", "doctest") else dtypedoctor  # where torch comes behind doctest
    done = start("exec", "--once", "--out", "run", *arguments, cwd=tmp_path)
    findings = [finding["id"] for finding in report_of(tmp_path / "run")["findings"]]
    assert (done.code, findings) == (code, ["float16-overflow"] if code else []), done.out + done.err
