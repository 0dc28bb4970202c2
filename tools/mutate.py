"""A sample of mutants of the diagnosis, the rules and the trials, and which of them the unit tests notice.

A mutant is one small change of one function: a comparison turned, `and` for `or`, a condition negated, a number one larger, nothing
returned. It is compiled into a fork of this process, which has imported what the tests import, and the unit tests that call the function
run there until one fails. A mutant that passes all of them survived: a test is missing, or the change changes nothing::

    python tools/mutate.py map                     # which test calls which function; once, some minutes, into .mutation/
    python tools/mutate.py run --count 300         # one line for each mutant into .mutation/mutants.jsonl; can be interrupted
    python tools/mutate.py table                   # the share that survived, and every survivor

``map`` and ``run`` use ``--jobs`` processes. A test that fails without a mutant is not in the map: it would notice every one.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib.abc
import importlib.util
import json
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / ".mutation"
MUTATED = ("diagnosis", "rules", "examination", "lab/trials", "lab/bisect", "lab/compare")
TESTS = ROOT / "tests" / "unit"

MOST_TESTS = 400
"""Tests that are tried on a mutant, the quickest first."""
LONGEST = 120
"""Seconds after which a mutant counts as noticed: it hangs."""
PRELOADED = ("pytest", "hypothesis", "jsonschema", "pydantic", "typer", "rich.console", "yaml", "markdown_it")
"""What forks need not import again."""

OPPOSITE: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult,
}  # fmt: skip
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change: the ``number``-th that is possible in the function ``function`` (``path:qualified name``)."""

    function: str
    number: int

    @property
    def path(self) -> Path:
        """The mutated file."""
        return ROOT / self.function.partition(":")[0]

    def tree(self) -> tuple[ast.Module, int, str, str]:
        """The module with the change, its line, and the changed expression before and after."""
        tree = ast.parse(self.path.read_text(encoding="utf-8"))
        name = self.function.partition(":")[2]
        body = next(node for found, node in functions(tree) if found == name)
        return (ast.fix_missing_locations(tree), *list(changes(body))[self.number](True))


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods with their qualified names; one inside of another belongs to it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from functions(node, f"{prefix}{node.name}.")


def changes(function: ast.FunctionDef) -> Iterator[Any]:
    """Functions that make a change in the tree and return its line and the expression before and after."""
    for parent in ast.walk(function):
        for field, value in ast.iter_fields(parent):
            for index, node in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(node, ast.AST) and field not in ("decorator_list", "annotation", "returns"):
                    for changed in variants(node, field):
                        yield _change(parent, field, index if isinstance(value, list) else None, node, changed)


def _change(parent: ast.AST, field: str, index: int | None, node: ast.AST, changed: ast.AST) -> Any:
    def make(_: bool) -> tuple[int, str, str]:
        before, after = ast.unparse(node), ast.unparse(changed)
        if index is None:
            setattr(parent, field, changed)
        else:
            getattr(parent, field)[index] = changed
        return getattr(node, "lineno", getattr(parent, "lineno", 0)), before, after

    return make


def variants(node: ast.AST, field: str) -> Iterator[ast.AST]:
    """What stands for ``node`` in its mutants."""
    changed: Any = copy.deepcopy(node)
    match changed:
        case ast.Compare():
            changed.ops[0] = OPPOSITE[type(changed.ops[0])]()
            yield changed
        case ast.BoolOp() | ast.BinOp() if type(changed.op) in OPPOSITE:
            changed.op = OPPOSITE[type(changed.op)]()
            yield changed
        case ast.UnaryOp(op=ast.Not()):
            yield changed.operand
        case ast.Constant(value=bool()):
            yield ast.copy_location(ast.Constant(not changed.value), node)
        case ast.Constant(value=int() | float()):
            yield ast.copy_location(ast.Constant(changed.value + 1), node)
        case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
            yield ast.copy_location(ast.Return(ast.copy_location(ast.Constant(None), node)), node)
        case ast.Call(func=ast.Name(id=name)) if name in SWAPPED:
            changed.func.id = SWAPPED[name]
            yield changed
        case ast.Name() | ast.Call() | ast.Attribute() if field in ("test", "ifs"):
            yield ast.copy_location(ast.UnaryOp(ast.Not(), changed), node)
        case ast.Continue():
            yield ast.copy_location(ast.Pass(), node)


def all_mutants() -> list[Mutant]:
    """Every change that is possible in the mutated rooms."""
    found = []
    for room in MUTATED:
        for path in sorted((ROOT / "dtypedoctor" / room).rglob("*.py")):
            for name, function in functions(ast.parse(path.read_text(encoding="utf-8"))):
                key = f"{path.relative_to(ROOT)}:{name}"
                found += [Mutant(key, number) for number in range(len(list(changes(function))))]
    return found


class Callers:
    """A pytest plugin that notes for each test which functions of the mutated rooms it called, and how long it took."""

    def __init__(self) -> None:
        self.tests: dict[str, tuple[float, list[str]]] = {}
        self._failed: set[str] = set()
        self._rooms = tuple(f"{ROOT}/dtypedoctor/{room}/" for room in MUTATED)
        self._codes: set[CodeType] = set()
        self._others: set[CodeType] = set()

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> Any:
        """Around a test with its fixtures."""
        self._codes = set()
        sys.settrace(self._called)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        """After it."""
        sys.settrace(None)
        if nodeid in self._failed:
            return
        names = {f"{Path(c.co_filename).relative_to(ROOT)}:{outermost(c.co_qualname)}" for c in self._codes}
        self.tests[nodeid] = (self.seconds.pop(nodeid, 0.0), sorted(names))

    seconds: dict[str, float] = defaultdict(float)  # noqa: RUF012

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Setup, call or teardown is over."""
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self._failed.add(report.nodeid)

    def _called(self, frame: FrameType, _event: str, _argument: object) -> None:
        code = frame.f_code
        if code not in self._codes and code not in self._others:
            (self._codes if code.co_filename.startswith(self._rooms) else self._others).add(code)


def outermost(qualified: str) -> str:
    """The function or method that holds a nested function, lambda or comprehension."""
    return qualified.partition(".<locals>")[0]


def in_processes(work: Callable[[int], None], jobs: int) -> None:
    """Calls ``work(0)`` … ``work(jobs - 1)``, each in a fork, and waits for all of them."""
    children = []
    for job in range(jobs):
        child = os.fork()
        if child == 0:
            try:
                work(job)
            finally:
                os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)


def write_map(files: Sequence[str], jobs: int) -> None:
    """Runs the unit tests and writes which function is called by which test."""
    import pytest

    KEPT.mkdir(exist_ok=True)
    asked = sorted(files or map(str, TESTS.glob("test_*.py")), key=lambda name: -Path(name).stat().st_size)

    def part(job: int) -> None:
        callers = Callers()
        pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:warnings", *asked[job::jobs]], plugins=[callers])
        (KEPT / f"callers-{job}.json").write_text(json.dumps(callers.tests))

    in_processes(part, jobs)
    path = KEPT / "callers.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    for job in range(jobs):
        known |= json.loads((KEPT / f"callers-{job}.json").read_text())
    path.write_text(json.dumps(known))


def read_map() -> dict[str, list[str]]:
    """Tests by the function that they call, the quickest first."""
    callers: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for test, (seconds, names) in json.loads((KEPT / "callers.json").read_text()).items():
        for name in names:
            callers[name].append((seconds, test))
    return {name: [test for _, test in sorted(tests)[:MOST_TESTS]] for name, tests in callers.items()}


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a changed tree."""

    def __init__(self, name: str, path: Path, tree: ast.Module) -> None:
        self._name, self._path, self._tree = name, path, tree

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        """Only of that module."""
        if fullname != self._name:
            return None
        package = self._path.name == "__init__.py"
        return importlib.util.spec_from_file_location(
            fullname, self._path, loader=self, submodule_search_locations=[str(self._path.parent)] if package else None
        )

    def exec_module(self, module: ModuleType) -> None:
        """Runs the changed code."""
        exec(compile(self._tree, str(self._path), "exec"), module.__dict__)  # noqa: S102


def noticed(mutant: Mutant, tree: ast.Module, tests: Sequence[str]) -> str:
    """``killed``, ``survived`` or ``hangs``: how the tests end in a fork that has the mutant."""
    child = os.fork()
    if child == 0:
        os.setsid()  # a mutant may end a whole group of processes
        signal.alarm(LONGEST)
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        parts = mutant.path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        sys.meta_path.insert(0, Mutated(name, mutant.path, tree))
        import pytest

        code = 1
        try:
            code = int(
                pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:warnings", "-p", "no:xdist", *tests])
            )
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return {0: "survived", -signal.SIGALRM: "hangs"}.get(code, "killed")


def run(count: int, seed: int, jobs: int) -> None:
    """Tries mutants of a random order until there are ``count`` lines."""
    for name in PRELOADED:
        importlib.import_module(name)
    tests = read_map()
    lines = KEPT / "mutants.jsonl"
    done = {(m["function"], m["number"]) for m in outcomes()} if lines.exists() else set()
    order = all_mutants()
    random.Random(seed).shuffle(order)
    left = [mutant for mutant in order[:count] if (mutant.function, mutant.number) not in done]

    def part(job: int) -> None:
        for mutant in left[job::jobs]:
            row = tried(mutant, tests.get(mutant.function, []))
            with lines.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    in_processes(part, jobs)


def tried(mutant: Mutant, callers: Sequence[str]) -> dict[str, Any]:
    """The line for one mutant."""
    began = time.monotonic()
    tree, line, before, after = mutant.tree()
    outcome = noticed(mutant, tree, callers) if callers else "never called"
    return {"function": mutant.function, "number": mutant.number, "line": line, "before": before, "after": after,
            "outcome": outcome, "tests": len(callers), "seconds": round(time.monotonic() - began, 1)}  # fmt: skip


def outcomes() -> list[dict[str, Any]]:
    """The mutants that were tried."""
    return [json.loads(line) for line in (KEPT / "mutants.jsonl").read_text(encoding="utf-8").splitlines()]


def table() -> None:
    """Prints shares and survivors."""
    rows = outcomes()
    counts = Counter(row["outcome"] for row in rows)
    print(f"{len(rows)} mutants: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common()))
    called = len(rows) - counts["never called"]
    if called:
        print(f"{counts['survived'] / called:.0%} of the {called} that unit tests call survived")
    for row in sorted(
        (row for row in rows if row["outcome"] in ("survived", "never called")), key=lambda r: r["function"]
    ):
        print(f"{row['outcome']:<12} {row['function']}:{row['line']}  {row['before'][:90]}  ->  {row['after'][:90]}")


def main() -> None:
    """The three commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("map", "run", "table"))
    parser.add_argument("tests", nargs="*", help="of map: files of tests, all unit tests if none is given")
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    asked = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    match asked.what:
        case "map":
            write_map(asked.tests, asked.jobs)
        case "run":
            run(asked.count, asked.seed, asked.jobs)
        case "table":
            table()


if __name__ == "__main__":
    main()
