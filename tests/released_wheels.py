"""Released wheels, laid out as ``pip install --no-deps --target`` does, kept for the next run: a release never changes."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

WHEELS = Path(tempfile.gettempdir()) / "dtypedoctor-wheels"


def released(name: str, version: str) -> Path:
    """The folder of an unpacked wheel, fetched from the registry where it is not there yet; the test is skipped if it cannot be."""
    folder = WHEELS / f"{name}-{version}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as fetched:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--retries", "1"]
            try:
                subprocess.run(
                    [*pip, "-d", fetched, f"{name}=={version}"], check=True, capture_output=True, timeout=120
                )
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                pytest.skip(f"the wheel of {name} {version} cannot be fetched from the registry: {error}")
            [wheel] = Path(fetched).glob("*.whl")
            WHEELS.mkdir(exist_ok=True)
            unpacked = Path(tempfile.mkdtemp(dir=WHEELS))
            zipfile.ZipFile(wheel).extractall(unpacked)
            if not folder.is_dir():  # another test may have been faster
                unpacked.rename(folder)
    return folder
