"""What pip installs: the user's torch stays, and the commands of the README take the versions that were tested."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PINNED = {
    canonicalize_name(requirement.name): requirement.specifier
    for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    if line and not line.startswith("#")
    for requirement in [Requirement(line)]
}


@pytest.mark.parametrize("line", PROJECT["dependencies"])
def test_installing_the_package_never_downgrades_what_is_there(line: str) -> None:
    """A training environment keeps its torch: no requirement has an upper bound."""
    assert [bound.operator for bound in Requirement(line).specifier] == [">="]


@pytest.mark.parametrize("extra", ["", "hf", "ray", "slurm", "dev", "release"])
def test_each_requirement_is_pinned_to_a_version_that_it_allows(extra: str) -> None:
    """`-c constraints.txt` leaves nothing direct to the day of the installation, and contradicts no requirement."""
    lines = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    for requirement in map(Requirement, lines):
        if requirement.name in ("dtypedoctor", "setuptools"):  # itself; what builds is not what was tested
            continue
        (pin,) = PINNED[canonicalize_name(requirement.name)]
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), requirement
