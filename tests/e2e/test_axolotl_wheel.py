"""axolotl's released NF4 dequantizer, unchanged, under torch.compile: found in one run, corrected, and compared with its own fix."""

from pathlib import Path

import pytest
from command import Finished, forked, in_this_process, report_of
from released_wheels import released

from dtypedoctor.plugins import Correction, registered

pytestmark = pytest.mark.release

PROGRAM = Path(__file__).parents[2] / "scenarios" / "real" / "programs" / "axolotl_compiled.py"
CORRECTION = "axolotl-compiled-dequantize"
WITH_THE_DEFECT, WITHOUT = "0.17.0", "0.18.0"
WITHOUT_A_WHEEL = ("0.9.2", "0.15.0", "0.16.0", "0.16.1")


def run(verb: str, version: str, *options: str | Path) -> Finished:
    folder = released("axolotl", version, as_source=version in WITHOUT_A_WHEEL)
    path = {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    return forked(verb, *options, PROGRAM, **path)


def losses(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("loss")]


def test_graph_breaks_of_the_release_are_found_and_corrected(tmp_path: Path) -> None:
    """The line is axolotl's, not that of the helper in bitsandbytes at which most breaks are; corrected there is one graph."""
    done = run("exec", WITH_THE_DEFECT, "--try", CORRECTION, "--out", tmp_path / "run")
    report = report_of(tmp_path / "run")
    found, limit = report["findings"]
    assert (done.code, found["id"], limit["id"]) == (10, "compile-graph-break", "recompile-limit")
    assert (found["fqn"], found["source"]) == ("1.query", "axolotl/kernels/quantize.py:143")
    assert [(one["confidence"], one["remedies"]) for one in (found, limit)] == [("proven", [CORRECTION])] * 2
    assert {trial["remedy"]: trial["outcome"] for trial in report["trials"]}[CORRECTION] == "fixed"


def test_the_corrected_release_computes_what_the_next_one_does(tmp_path: Path) -> None:
    """One graph, no break, each weight bitwise that of bitsandbytes, and the same losses; the next release is quiet."""
    corrected = run("treat", WITH_THE_DEFECT, "--with", CORRECTION)
    done = run("exec", WITHOUT, "--out", tmp_path / "run")
    assert (done.code, report_of(tmp_path / "run")["findings"]) == (0, [])
    assert f"{CORRECTION} is in place: axolotl {WITH_THE_DEFECT}, axolotl/kernels/quantize.py:109" in corrected.err
    assert corrected.out.splitlines()[3:] == ["breaks 0", "graphs 1", "different 0"]
    assert losses(corrected.out) == losses(done.out)


@pytest.mark.parametrize("version", ["0.17.0", "0.18.0", "0.19.0"])
def test_a_release_is_corrected_or_refused_with_the_difference(version: str) -> None:
    """The last two have their own fix for compiled code, in functions of other lines."""
    source = released("axolotl", version)
    fits = []
    for name in [one.id for one in registered(Correction).values() if one.library == "axolotl"]:
        done = in_this_process("explain", name, "--patch", "--source", source)
        if done.code == 0:
            fits.append(name)
            assert "--- a/axolotl/kernels/quantize.py" in done.out
        else:
            assert f"{name} does not fit axolotl {version}: axolotl/kernels/quantize.py" in done.err
    assert (
        fits
        == {
            "0.17.0": [CORRECTION, "axolotl-stream-per-call"],
            "0.18.0": [],
            "0.19.0": [],
        }[version]
    )
