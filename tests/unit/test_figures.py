"""The figures of docs/architecture.md are counted, and none gets worse than the page says."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from figures import PAGE, Code, code_lines, documented, figures, rings, with_counts


def test_no_figure_is_worse_than_the_page_says() -> None:
    """What the page states is a ceiling, to the last line; after a change that makes one better: `python tools/figures.py --write`."""
    counts = figures()
    rows = documented(PAGE.read_text(encoding="utf-8"))
    assert [row.name for row in rows] == list(counts)
    worse = {row.name: (counts[row.name], row.now) for row in rows if counts[row.name] > row.now}
    assert not worse, f"(counted, documented): {worse}; see python tools/figures.py"


def package(root: Path, **sources: str) -> Code:
    """A package of a few modules."""
    (root / "dtypedoctor").mkdir()
    for name, source in sources.items():
        (root / "dtypedoctor" / f"{name}.py").write_text(source)
    return Code(root)


def test_a_chain_of_imports_counts_those_inside_functions_and_not_those_for_types(tmp_path: Path) -> None:
    """Four modules in a row, one of them by an import in a function."""
    code = package(
        tmp_path,
        a="from dtypedoctor.b import x",
        b="import dtypedoctor.c\ndef f():\n    from dtypedoctor import d",
        c="import typing\nif typing.TYPE_CHECKING:\n    import dtypedoctor.a",
        d="from dtypedoctor.c import y",
    )
    assert code.depth() == 4
    assert list(code.with_one_importer()) == ["dtypedoctor.b", "dtypedoctor.d"]


def test_modules_that_import_each_other_are_a_ring_and_one_step_of_a_chain(tmp_path: Path) -> None:
    """An import for types closes a ring, too, although not in the chain."""
    code = package(
        tmp_path,
        a="from dtypedoctor.b import x",
        b="def f():\n    import dtypedoctor.c",
        c="import dtypedoctor.b, dtypedoctor.d",
        d="if TYPE_CHECKING:\n    import dtypedoctor.a",
    )
    assert rings(code.imports(inside_functions=True)) == [{"dtypedoctor.b", "dtypedoctor.c"}]
    assert code.depth() == 3
    (ring,) = rings(code.imports(inside_functions=True, for_types=True))
    assert len(ring) == 4


def test_docstrings_and_comments_are_no_code_lines() -> None:
    """A comment behind code does not make the line one of comments."""
    assert code_lines('"""Words.\n\nMore words."""\n\n# why\nx = 1  # one\n') == 1


def test_lines_are_those_of_the_doctor_or_of_the_laboratory(tmp_path: Path) -> None:
    """What makes further runs is the laboratory, wherever it lies today."""
    code = package(tmp_path, a="x = 1\n\n")
    for folder in ("lab", "trials"):
        (tmp_path / "dtypedoctor" / folder).mkdir()
        (tmp_path / "dtypedoctor" / folder / "b.py").write_text("y = 1\n")
    assert (code.lines(laboratory=False), code.lines(laboratory=True)) == (2, 2)


def test_a_dense_function_is_short_and_branches_in_expressions(tmp_path: Path) -> None:
    """Eleven conditions in one line are too many, ten branches are not."""
    many = " or ".join(f"x == {n}" for n in range(11))
    code = package(
        tmp_path, a=f"def dense(x):\n    return {many}", b="def plain(x):\n    return x if x else [y for y in x if y]"
    )
    assert list(code.dense_functions()) == ["dtypedoctor.a:1 dense"]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import torch._dynamo", True),
        ("from torch.utils import _pytree as tree", True),
        ("from torch import nn\nnn.Module._apply", True),
        ("import_module('torch._inductor.config')", True),
        ("import torch\ntorch.__version__, torch.nn.Linear", False),
        ("self._torch = 1\n'torch._dynamo writes this, and more'", False),
    ],
)
def test_private_names_of_torch_are_found_in_imports_expressions_and_strings(
    source: str, found: bool, tmp_path: Path
) -> None:
    """One leading underscore in any part; words about torch and double underscores are none."""
    assert bool(list(package(tmp_path, a=source).with_private_torch())) is found


def test_broad_handlers_and_untyped_kinds_are_counted(tmp_path: Path) -> None:
    """Bare, in a tuple, in `suppress`; kinds that are written and read count once."""
    code = package(
        tmp_path,
        a="try: pass\nexcept (ValueError, Exception): pass\ntry: pass\nexcept: pass\nwith suppress(BaseException): pass",
        b="try: pass\nexcept OSError: pass\nobserved(trace, 'twins')\nObservation(n=1, kind='twins')\no.kind == 'packed-bits'",
    )
    assert len(list(code.broad_excepts())) == 3
    assert code.untyped_kinds() == {"twins", "packed-bits"}


def test_only_the_column_now_of_the_figures_is_written() -> None:
    """Before and goal stay as they are."""
    page = "text\n| broad excepts | 36 | 24 | 6 |\nmore\n"
    assert with_counts(page, {"broad excepts": 1_023}) == "text\n| broad excepts | 36 | 1,023 | 6 |\nmore\n"
