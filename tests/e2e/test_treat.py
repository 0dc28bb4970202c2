"""``dtypedoctor treat``: a script with a correction and nothing else."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command import dtypedoctor

CORRECTION = "unsloth-buffer-of-its-dtype"


def package(folder: Path, line: str) -> Path:
    """A package with the name and the function that the correction is for, and a script that uses it."""
    (folder / "unsloth" / "kernels").mkdir(parents=True)
    (folder / "unsloth" / "__init__.py").touch()
    (folder / "unsloth" / "kernels" / "__init__.py").touch()
    (folder / "unsloth" / "kernels" / "utils.py").write_text(
        "BUFFER = {}\n"
        "def fast_dequantize(W, quant_state=None, out=None, use_global_buffer=False):\n"
        "    dtype, WEIGHT_BUFFER = quant_state, BUFFER.get(0)\n"
        f"    {line}\n"
        "        BUFFER[0] = WEIGHT_BUFFER = W\n"
        "    return WEIGHT_BUFFER\n"
    )
    script = folder / "train.py"
    script.write_text(
        "import sys\n"
        "from types import SimpleNamespace as S\n"
        "from unsloth.kernels.utils import fast_dequantize\n"
        "for dtype in 'half', 'float':\n"
        "    print(fast_dequantize(S(dtype=dtype), dtype).dtype, sys.argv[1:])\n"
        "sys.exit(7)\n"
    )
    return script


def test_the_script_runs_corrected_and_ends_with_its_own_status(tmp_path: Path) -> None:
    """Its output is its own, one line says what is in place, and torch is not imported for it."""
    done = dtypedoctor("treat", "--with", CORRECTION, package(tmp_path, "if WEIGHT_BUFFER is None:"), "--lr", "1")
    assert (done.code, done.out) == (7, "half ['--lr', '1']\nfloat ['--lr', '1']\n")
    assert done.err == (
        f"dtypedoctor: {CORRECTION} is in place: unsloth, unsloth/kernels/utils.py:4; "
        "it was tried on 2025.9.1, 2025.12.1, 2026.1.1, 2026.2.1, not on this release\n"
    )


@pytest.mark.release(all_but=1)
@pytest.mark.parametrize("found_before", [True, False])
def test_a_changed_source_ends_with_2_and_the_difference(tmp_path: Path, found_before: bool) -> None:
    """Before the script starts, or where the script itself says where the library is, when it imports it."""
    script = package(tmp_path, "if not WEIGHT_BUFFER:")
    if not found_before:
        (tmp_path / "elsewhere").mkdir()
        moved = tmp_path / "elsewhere" / "train.py"
        moved.write_text(f"import sys\nprint('begun')\nsys.path.insert(0, {str(tmp_path)!r})\n{script.read_text()}")
        script = moved
    done = dtypedoctor("treat", "--with", CORRECTION, script)
    assert (done.code, done.out) == (2, "" if found_before else "begun\n")
    assert (
        f"error: {CORRECTION} does not fit unsloth: unsloth/kernels/utils.py:2: fast_dequantize has no "
        "`if WEIGHT_BUFFER is None:`, which this correction was written for; "
        "unsloth/kernels/utils.py:4 has `if not WEIGHT_BUFFER:`\n"
    ) in done.err


def test_a_library_with_its_own_correction_runs_as_it_is(tmp_path: Path) -> None:
    """An update of the library does not break the command."""
    script = package(tmp_path, "if WEIGHT_BUFFER is None or WEIGHT_BUFFER.dtype != dtype:")
    done = dtypedoctor("treat", "--with", CORRECTION, script)
    assert (done.code, done.out) == (7, "half []\nfloat []\n")
    assert "is not needed any more" in done.err


@pytest.mark.release
def test_an_unknown_correction_is_a_usage_error(tmp_path: Path) -> None:
    """So is one that no script can have."""
    script = package(tmp_path, "if WEIGHT_BUFFER is None:")
    assert dtypedoctor("treat", "--with", "nothing", script).code == 2
    assert dtypedoctor("treat", "--with", "keep-float32", script).code == 2


def test_the_patch_is_that_of_the_source_that_is_there(tmp_path: Path) -> None:
    """With a test for the library; where the source differs there is none."""
    package(tmp_path, "if WEIGHT_BUFFER is None:")
    done = dtypedoctor("explain", CORRECTION, "--patch", "--source", tmp_path)
    changed = [line for line in done.out.splitlines() if line.startswith(("---", "+++", "-  ", "+  "))]
    assert changed[:4] == [
        "--- a/unsloth/kernels/utils.py",
        "+++ b/unsloth/kernels/utils.py",
        "-    if WEIGHT_BUFFER is None:",
        "+    if WEIGHT_BUFFER is None or WEIGHT_BUFFER.dtype != dtype:",
    ]
    assert changed[4:6] == ["--- /dev/null", "+++ b/tests/test_unsloth_buffer_of_its_dtype.py"]
    shutil.rmtree(tmp_path / "unsloth")
    missing = dtypedoctor("explain", CORRECTION, "--patch", "--source", tmp_path)
    assert (missing.code, missing.out) == (2, "")
    assert "pip install --no-deps --target DIR unsloth==2026.2.1" in missing.err


CHILDREN = """
import multiprocessing, os, subprocess, sys
from types import SimpleNamespace as S


def second_dtype(_):
    from unsloth.kernels.utils import fast_dequantize
    fast_dequantize(S(dtype="half"), "half")
    return fast_dequantize(S(dtype="float"), "float").dtype


if __name__ == "__main__":
    for way in ("spawn", "forkserver", "fork"):
        with multiprocessing.get_context(way).Pool(2) as pool:
            print(way, pool.map(second_dtype, range(2), chunksize=1))
    here = os.path.dirname(os.path.abspath(__file__))
    code = "import sys; sys.path.insert(0, %r); from train import second_dtype; print(second_dtype(0))" % here
    for flags in ([], ["-I"]):
        print(flags, subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, check=True).stdout)
"""


@pytest.mark.release
def test_processes_that_the_script_starts_are_treated_or_named(tmp_path: Path) -> None:
    """Spawned, forked and started by their command line; one that takes nothing from its environment is named before the end."""
    script = package(tmp_path, "if WEIGHT_BUFFER is None:")
    script.write_text(CHILDREN)
    done = dtypedoctor("treat", "--with", CORRECTION, script)
    assert done.code == 0, done.err
    assert done.out.splitlines() == [
        "spawn ['float', 'float']",
        "forkserver ['float', 'float']",
        "fork ['float', 'float']",
        "[] float",
        "",
        "['-I'] half",
        "",
    ]
    reached, missed = done.err.splitlines()
    assert re.fullmatch(rf"dtypedoctor: {CORRECTION} is in place in \d processes that the script started", reached)
    assert missed.startswith(f"dtypedoctor: not treated: {sys.executable} -I -c ")


@pytest.mark.release
def test_every_rank_of_torchrun_is_treated(tmp_path: Path) -> None:
    """The launcher itself imports no library, and does not say that the correction was not used."""
    script = package(tmp_path, "if WEIGHT_BUFFER is None:")
    script.write_text(script.read_text().replace("sys.exit(7)", ""))
    launch = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script
    done = dtypedoctor("treat", "--with", CORRECTION, *launch)
    said = re.findall(r"half|float|\[\]", done.out)  # two ranks may write into one line
    assert (done.code, sorted(said)) == (0, sorted(["half", "[]", "float", "[]"] * 2)), done.err
    assert f"{CORRECTION} is in place in 2 processes that the script started\n" in done.err
    assert "not treated" not in done.err


OTHERS = """
import os, subprocess, sys
root = dict(os.environ)
print("own", subprocess.run([sys.executable, "-c", ""], env=root, capture_output=True, text=True).stdout)
del root["DTYPEDOCTOR_TREATED"], root["DTYPEDOCTOR_BEGIN"]
print("cleaned", subprocess.run([sys.executable, "-c", ""], env=root, capture_output=True, text=True).stdout)
other = subprocess.run([sys.argv[1], "-c", "import sys; print('dtypedoctor.lab.corrections.treated' in sys.modules)"], capture_output=True, text=True)
print("other", other.stdout, other.stderr)
"""


@pytest.mark.release
def test_the_users_own_sitecustomize_runs_in_every_process_and_other_pythons_are_left_alone(tmp_path: Path) -> None:
    """Also where a process does not inherit all variables; an interpreter of another environment imports nothing of this package."""
    script = package(tmp_path, "if WEIGHT_BUFFER is None:")
    script.write_text(OTHERS)
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sitecustomize.py").write_text("print('mine')\n")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "other")], check=True)
    path, other = os.pathsep.join([str(tmp_path / "own"), *sys.path]), tmp_path / "other" / "bin" / "python"
    done = dtypedoctor("treat", "--with", CORRECTION, script, other, PYTHONPATH=path)
    assert done.code == 0, done.err
    assert "own mine" in done.out
    assert "cleaned mine" in done.out
    assert "other mine\nFalse\n \n" in done.out
