"""unsloth's released kernels, unchanged: a second 4-bit model in another dtype is read from memory of the first one's."""

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from command import dtypedoctor, report_of

PROGRAM = Path(__file__).parent / "unsloth_two_loads.py"
LAST_WITH_THE_DEFECT, FIRST_WITHOUT = "2026.2.1", "2026.3.1"
WHEELS = Path(tempfile.gettempdir()) / "dtypedoctor-wheels"
"""Kept for the next run; a release never changes."""


def kernels_of(version: str) -> Path:
    """The folder of an unpacked wheel, fetched from the registry where it is not there yet."""
    folder = WHEELS / f"unsloth-{version}"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as fetched:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "--retries", "1"]
            try:
                subprocess.run(
                    [*pip, "-d", fetched, f"unsloth=={version}"], check=True, capture_output=True, timeout=120
                )
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                pytest.skip(f"the wheel of unsloth {version} cannot be fetched from the registry: {error}")
            [wheel] = Path(fetched).glob("*.whl")
            zipfile.ZipFile(wheel).extractall(f"{fetched}/unpacked")
            WHEELS.mkdir(exist_ok=True)
            Path(fetched, "unpacked").rename(folder)
    return folder


def diagnosed(version: str, folder: Path, *words: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and findings of the two loads under ``dtypedoctor exec``."""
    done = dtypedoctor(
        "exec", "--out", folder / "run", PROGRAM, kernels_of(version), *words, cwd=folder, OMP_NUM_THREADS="1"
    )
    return done.code, report_of(folder / "run")["findings"]


def test_the_stale_buffer_of_the_released_kernels_is_found_under_autocast(tmp_path: Path) -> None:
    """Nothing raises and everything is finite; the finding names the first wrong weight and unsloth's own line."""
    code, findings = diagnosed(
        LAST_WITH_THE_DEFECT, tmp_path, "bfloat16", "float16", "autocast", "all", "lora", "train"
    )
    found = findings[0]
    assert code == 10
    assert [finding["id"] for finding in findings] == ["stale-dequant-buffer"]
    assert (found["confidence"], found["dtype"]) == ("proven", "bfloat16")
    assert found["fqn"].endswith("layers.0.self_attn.q_proj.base_layer")
    assert found["source"] == "unsloth/kernels/utils.py:1023"


def test_the_corrected_release_has_no_findings(tmp_path: Path) -> None:
    """The same program, in the order in which the buffer also has to grow."""
    code, findings = diagnosed(FIRST_WITHOUT, tmp_path, "float16", "bfloat16", "autocast", "all", "lora", "train")
    assert (code, findings) == (0, [])
