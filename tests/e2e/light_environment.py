"""A virtual environment with dtypedoctor and the core dependencies of ``pyproject.toml``, and nothing else.

Its packages are links into the environment that runs the tests, so it is made in a second and without a network.
"""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path

from command import Finished
from packaging.requirements import Requirement
from patience import PATIENCE

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]


class Light:
    """The environment in ``folder``, with another folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self._python = folder / "environment" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "environment"], check=True)
        self.packages = next((folder / "environment").glob("lib/python3*/site-packages"))
        for found in core_distributions():
            for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__", "bin"}:
                if not (self.packages / name).is_symlink():
                    (self.packages / name).symlink_to(Path(str(found.locate_file(name))))
        (self.packages / "dtypedoctor").symlink_to(REPOSITORY / "dtypedoctor")

    def __call__(self, *arguments: str | Path, **environment: str) -> Finished:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run(
            [self._python, *map(str, arguments)],
            cwd=self.folder,
            env=inherited | environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=False,
        )
        return Finished(code=done.returncode, out=done.stdout, err=done.stderr)

    def dtypedoctor(self, *arguments: str | Path) -> Finished:
        return self("-m", "dtypedoctor", *arguments)


def core_distributions() -> list[Distribution]:
    """What ``pip install dtypedoctor`` installs, from what is installed here."""
    found: dict[str, Distribution] = {}
    left = [Requirement(one) for one in PROJECT["dependencies"]]
    while left:
        wanted = left.pop()
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        if name in found or (wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})):
            continue
        found[name] = distribution(name)
        left += [Requirement(one) for one in found[name].requires or ()]
    return list(found.values())
