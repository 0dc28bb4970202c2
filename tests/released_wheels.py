"""Released wheels, laid out as ``pip install --no-deps --target`` does, kept for the next run: a release never changes."""

import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

import pytest

WHEELS = Path(tempfile.gettempdir()) / "dtypedoctor-wheels"


def released(name: str, version: str, *, as_source: bool = False) -> Path:
    """The folder of an unpacked wheel, or ``as_source`` that of the package in a source archive, where a release has no wheel.

    It is fetched from the registry where it is not there yet; the test is skipped if it cannot be.
    """
    folder = WHEELS / f"{name}-{version}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as fetched:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--retries", "1"]
            pip += ["--no-binary", name] if as_source else ["--only-binary=:all:"]
            try:
                subprocess.run(
                    [*pip, "-d", fetched, f"{name}=={version}"], check=True, capture_output=True, timeout=120
                )
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                pytest.skip(f"the wheel of {name} {version} cannot be fetched from the registry: {error}")
            [archive] = Path(fetched).glob(f"{name}-{version}*")
            WHEELS.mkdir(exist_ok=True)
            unpacked = Path(tempfile.mkdtemp(dir=WHEELS))
            if as_source:
                with tarfile.open(archive) as contents:
                    contents.extractall(unpacked, filter="data")
                unpacked = next(unpacked.glob(f"**/{name}/__init__.py")).parents[1]
            else:
                zipfile.ZipFile(archive).extractall(unpacked)
            try:
                unpacked.rename(folder)
            except OSError:  # a test in another process was faster
                if not folder.is_dir():
                    raise
    return folder
