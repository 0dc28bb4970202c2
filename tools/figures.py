"""Counts how tangled the package is, for the table of figures in docs/architecture.md.

As a program it prints the table. ``--write`` puts the counts that have fallen into the column *now* of the page, where they are ceilings;
``--raise`` puts the others there too, and the commit says what they are worth::

    python tools/figures.py [--write | --raise]

Everything is read from the syntax trees of ``dtypedoctor/**/*.py``; nothing is imported.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeGuard

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGE = "dtypedoctor"

SHORT = 20
"""Lines of a function that ought to read at a glance."""
DENSE = 10
"""Cyclomatic complexity above which it does not."""

LABORATORY = {"lab", "trials", "workloads"}
"""Folders of what makes further runs: all that is in ``lab``, and two names of it that plug-ins know."""

BROAD = {"Exception", "BaseException"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def figures(code: Code) -> dict[str, int]:
    """Each figure of the table by its name there, in the table's order."""
    return {
        "lines of the doctor": code.lines(laboratory=False),
        "lines of the laboratory": code.lines(laboratory=True),
        "files": len(code.texts),
        "functions per 1,000 code lines": code.functions_per_thousand_lines(),
        "import depth, imports inside functions counted": code.depth(),
        "rings of imports, those for types counted": len(rings(code.imports(inside_functions=True, for_types=True))),
        f"functions of at most {SHORT} lines with a complexity over {DENSE}": len(list(code.dense_functions())),
        "modules with exactly one importer": len(list(code.with_one_importer())),
        "broad excepts": len(list(code.broad_excepts())),
        "files with private names of torch": len(list(code.with_private_torch())),
        "kinds of records without a type": len(code.untyped_kinds()),
    }


@dataclass(frozen=True)
class Code:
    """The package's sources. Places are given as ``path:line``."""

    root: Path

    @cached_property
    def texts(self) -> Mapping[str, str]:
        """Source by dotted name of the module."""
        found = {}
        for path in sorted((self.root / PACKAGE).rglob("*.py")):
            parts = path.relative_to(self.root).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
        return found

    @cached_property
    def trees(self) -> Mapping[str, ast.Module]:
        """Syntax tree by dotted name of the module."""
        return {name: ast.parse(text) for name, text in self.texts.items()}

    @cached_property
    def nodes(self) -> Mapping[str, Sequence[ast.AST]]:
        """Every node of a module's tree, by the module's name: walking takes longer than all that is asked of the nodes."""
        return {name: list(ast.walk(tree)) for name, tree in self.trees.items()}

    @cached_property
    def imports_at_run_time(self) -> Mapping[str, set[str]]:
        """What each module imports, also inside of functions, but not for types."""
        return self.imports(inside_functions=True)

    def imports(self, *, inside_functions: bool, for_types: bool = False) -> dict[str, set[str]]:
        """For each module the modules of the package that it imports."""
        found: dict[str, set[str]] = {}
        for name, tree in self.trees.items():
            wanted = set(imported_names(tree, inside_functions=inside_functions, for_types=for_types))
            found[name] = {self._module(one) for one in wanted if self._module(one)} - {name}
        return found

    def _module(self, dotted: str) -> str:
        """``a.b.name`` is the module of that name, or else a name in ``a.b``; empty for what is not of the package."""
        if dotted in self.trees:
            return dotted
        parent = dotted.rpartition(".")[0]
        return parent if parent in self.trees else ""

    def lines(self, *, laboratory: bool) -> int:
        """All lines of the doctor's files or of the laboratory's."""
        return sum(
            len(text.splitlines())
            for name, text in self.texts.items()
            if (name.split(".")[1:2] in ([one] for one in LABORATORY)) == laboratory
        )

    def functions_per_thousand_lines(self) -> int:
        """Methods and functions inside of functions count; a code line has more on it than a comment, and is in no docstring."""
        functions = sum(isinstance(node, Function) for nodes in self.nodes.values() for node in nodes)
        return round(1_000 * functions / sum(code_lines(self.texts[name], nodes) for name, nodes in self.nodes.items()))

    def depth(self) -> int:
        """Modules in the longest chain of imports; a ring counts as one step of it."""
        imports = self.imports_at_run_time
        step_of = {name: min(ring) for ring in rings(imports) for name in ring}
        after: dict[str, set[str]] = {}
        for name, imported in imports.items():
            step = step_of.get(name, name)
            after.setdefault(step, set()).update({step_of.get(other, other) for other in imported} - {step})
        depths: dict[str, int] = {}

        def measure(step: str) -> int:
            if step not in depths:
                depths[step] = 1 + max((measure(other) for other in after[step]), default=0)
            return depths[step]

        return max(measure(step) for step in after)

    def with_one_importer(self) -> Iterator[str]:
        """Modules that exactly one other module imports, functions included."""
        imports = self.imports_at_run_time
        for name in imports:
            if sum(name in wanted for wanted in imports.values()) == 1:
                yield name

    def dense_functions(self) -> Iterator[str]:
        """Short functions with many branches."""
        for name, nodes in self.nodes.items():
            for node in nodes:
                if isinstance(node, Function) and length(node) <= SHORT and complexity(node) > DENSE:
                    yield f"{name}:{node.lineno} {node.name}"

    def broad_excepts(self) -> Iterator[str]:
        """Handlers and ``suppress`` that take whatever comes."""
        for name, nodes in self.nodes.items():
            for node in nodes:
                if isinstance(node, ast.ExceptHandler):
                    if node.type is None or names_in(node.type) & BROAD:
                        yield f"{name}:{node.lineno}"
                elif is_call_of(node, "suppress") and any(names_in(one) & BROAD for one in node.args):
                    yield f"{name}:{node.lineno}"

    def with_private_torch(self) -> Iterator[str]:
        """Modules that name something of torch that begins with an underscore."""
        for name, nodes in self.nodes.items():
            if next(private_torch_names(nodes), None) is not None:
                yield name

    def untyped_kinds(self) -> set[str]:
        """Kinds of ``Observation``, a record whose fields no type checker sees."""
        return {kind for nodes in self.nodes.values() for node in nodes for kind in observed_kinds(node)}


def imported_names(tree: ast.AST, *, inside_functions: bool, for_types: bool = False) -> Iterator[str]:
    """Dotted names after ``import``; those in blocks for type checking only where they are asked for."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, Function) and not inside_functions:
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        else:
            yield from imported_names(node, inside_functions=inside_functions, for_types=for_types)


def rings(imports: Mapping[str, set[str]]) -> list[frozenset[str]]:
    """Groups of modules each of which imports every other one of its group, directly or by others."""
    reached: dict[str, set[str]] = {}
    for name in imports:
        waiting, seen = [name], set[str]()
        while waiting:
            new = imports[waiting.pop()] - seen
            seen |= new
            waiting += new
        reached[name] = seen
    return list(
        {frozenset(other for other in reached[name] if name in reached[other]) for name in reached} - {frozenset()}
    )


def code_lines(text: str, nodes: Iterable[ast.AST]) -> int:
    """Lines that hold code, and not only a comment or a part of a docstring."""
    documentation = {
        line
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        bool(line.strip()) and not line.lstrip().startswith("#") and number not in documentation
        for number, line in enumerate(text.splitlines(), 1)
    )


def length(function: Function) -> int:
    """Lines from ``def`` to the end."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def complexity(function: Function) -> int:
    """Cyclomatic complexity; conditions in expressions and comprehensions count like statements."""
    return 1 + sum(branches(node) for node in ast.walk(function))


def branches(node: ast.AST) -> int:
    """How many ways a node adds."""
    match node:
        case ast.If() | ast.IfExp() | ast.For() | ast.AsyncFor() | ast.While():
            return 1
        case ast.ExceptHandler() | ast.match_case() | ast.Assert():
            return 1
        case ast.BoolOp():
            return len(node.values) - 1
        case ast.comprehension():
            return 1 + len(node.ifs)
    return 0


def is_call_of(node: ast.AST, name: str) -> TypeGuard[ast.Call]:
    """Whether a node calls the function ``name``, however it was imported."""
    return isinstance(node, ast.Call) and name in (getattr(node.func, "id", None), getattr(node.func, "attr", None))


def names_in(node: ast.AST) -> set[str]:
    """Plain names in an expression."""
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def private_torch_names(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Dotted names of torch with a part that begins with one underscore, in imports, in expressions and in strings."""
    aliases = {"torch": "torch"}
    for node in nodes:
        if isinstance(node, ast.Import):
            aliases.update((alias.asname, alias.name) for alias in node.names if alias.asname)
            yield from (alias.name for alias in node.names if is_private_torch(alias.name))
        elif isinstance(node, ast.ImportFrom):
            names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            aliases.update(names)
            yield from filter(is_private_torch, names.values())
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if re.fullmatch(r"[\w.]+", node.value) and is_private_torch(node.value):
                yield node.value
        elif isinstance(node, ast.Attribute):
            first, _, rest = dotted(node).partition(".")
            if first in aliases and is_private_torch(f"{aliases[first]}.{rest}"):
                yield f"{aliases[first]}.{rest}"


def dotted(node: ast.Attribute) -> str:
    """``a.b.c`` of an attribute of a name, empty for one of anything else."""
    parts = [node.attr]
    value = node.value
    while isinstance(value, ast.Attribute):
        parts.append(value.attr)
        value = value.value
    return ".".join([value.id, *reversed(parts)]) if isinstance(value, ast.Name) else ""


def is_private_torch(name: str) -> bool:
    """Whether a dotted name is of torch and has a part that begins with one underscore."""
    first, *rest = name.split(".")
    return first == "torch" and any(re.match(r"_[^_]", part) for part in rest)


def observed_kinds(node: ast.AST) -> Iterator[str]:
    """Kinds that a node writes into an ``Observation`` or reads from one, where they are literal."""
    if isinstance(node, ast.Call):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        values: list[ast.AST] = list(node.args) if called in ("observed", "last_observed") else []
        values += [one.value for one in node.keywords if called == "Observation" and one.arg == "kind"]
    elif isinstance(node, ast.Compare) and getattr(node.left, "attr", "") == "kind":
        values = [one for one in ast.walk(node) if re.fullmatch(r"[a-z]+(-[a-z]+)+", str(getattr(one, "value", "")))]
    else:
        return
    yield from (one.value for one in values if isinstance(one, ast.Constant) and isinstance(one.value, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table. ``now`` is the number that the page states."""

    name: str
    before: int
    now: int
    goal: int


ROW = re.compile(r"^\| (?P<name>[^|]+?) \| (?P<before>[\d,]+) \| (?P<now>[\d,]+) \| (?P<goal>[\d,]+) \|$", re.MULTILINE)


def documented(page: str) -> list[Row]:
    """The rows of the table of figures in the text of docs/architecture.md."""
    return [
        Row(name=row["name"], **{key: int(row[key].replace(",", "")) for key in ("before", "now", "goal")})
        for row in ROW.finditer(page)
    ]


def with_counts(page: str, counts: Mapping[str, int]) -> str:
    """The page with ``counts`` in the column *now*."""

    def line(row: re.Match[str]) -> str:
        return f"| {row['name']} | {row['before']} | {counts[row['name']]:,} | {row['goal']} |"

    return ROW.sub(line, page)


def main(arguments: list[str]) -> int:
    """Prints the table of today's counts, and writes those that have fallen, or all of them, where asked to."""
    text, counts = PAGE.read_text(encoding="utf-8"), figures(Code(ROOT))
    page = with_counts(text, counts)
    if "--raise" in arguments:
        PAGE.write_text(page, encoding="utf-8")
    elif "--write" in arguments:
        lower = {row.name: min(row.now, counts[row.name]) for row in documented(text)}
        PAGE.write_text(with_counts(text, lower), encoding="utf-8")
    print("| | before | now | goal |\n|---|--:|--:|--:|")
    print("\n".join(row[0] for row in ROW.finditer(page)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
