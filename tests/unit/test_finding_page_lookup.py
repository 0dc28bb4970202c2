"""The page of a finding is found wherever the program was installed, and a wrong id is answered with the right one."""

from pathlib import Path

import pytest

from dtypedoctor.diagnosis import folder, page
from dtypedoctor.errors import DoctorError, ExitCode, UsageError

REPOSITORY = Path(__file__).parents[2]


def make_package(root: Path, *folders: str) -> Path:
    """An installed package below ``root``, with the given folders beside or inside it."""
    for name in ("dtypedoctor", *folders):
        (root / name).mkdir(parents=True, exist_ok=True)
    return root / "dtypedoctor"


def test_the_page_is_the_text_of_its_file() -> None:
    """In a source checkout it comes from docs, unchanged."""
    path = REPOSITORY / "docs" / "findings" / "autocast-bypass.md"
    assert page("autocast-bypass") == path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("autocast-bypas", "autocast-bypass"),
        ("Float16-Overflow", "float16-overflow"),
        ("float16_overflow", "float16-overflow"),
        ("quant-state", "quant-state-dtype"),
    ],
)
def test_a_misspelt_id_is_answered_with_the_nearest_one(typed: str, meant: str) -> None:
    """It is a mistake of the user's, and the message holds its solution."""
    with pytest.raises(UsageError) as caught:
        page(typed)
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.message == f"'{typed}': no such finding or fix; did you mean '{meant}'?"
    assert caught.value.hint == "`dtypedoctor explain` lists all."


def test_a_word_of_several_ids_is_answered_with_three_of_them() -> None:
    """In the place of the one that looks most like the word, and of a list of all."""
    with pytest.raises(UsageError) as caught:
        page("overflow")
    assert "; did you mean 'masked-overflow' or 'float16-overflow' or " in caught.value.message


def test_a_wheels_own_pages_come_first(tmp_path: Path) -> None:
    """A wheel that is used inside a checkout shows the pages it was built with."""
    package = make_package(tmp_path, "dtypedoctor/data/findings", "docs/findings")
    (tmp_path / "pyproject.toml").touch()
    assert folder(package) == package / "data" / "findings"


def test_a_checkout_has_its_pages_in_docs(tmp_path: Path) -> None:
    """There is no data folder inside the package."""
    package = make_package(tmp_path, "docs/findings")
    (tmp_path / "pyproject.toml").touch()
    assert folder(package) == tmp_path / "docs" / "findings"


def test_somebody_elses_docs_in_site_packages_are_left_alone(tmp_path: Path) -> None:
    """Packages that install a top-level docs folder exist; without a project file beside it, it is not ours."""
    package = make_package(tmp_path, "docs/findings")
    with pytest.raises(DoctorError, match="missing from this installation") as caught:
        folder(package)
    assert caught.value.exit_code == ExitCode.INTERNAL
