"""The scripts of the corpus with CUDA as their default device: what ``exec`` says there, beside their headers.

    python -m tests.benchmarks.corpus_on_cuda --out FOLDER                 # all of them, as many at a time as there are cores
    python -m tests.benchmarks.corpus_on_cuda overflow_residual_sum        # one script

A copy of each script begins with a line that sets the default device, so its modules and inputs are made there, from the numbers that a CPU would draw
(:mod:`default_cuda`); "cpu" in its text becomes "cuda". A script that does not end so without dtypedoctor as its header says (it needs gloo, or fails in another
way on a GPU) is counted as *other* and not judged.
Of the rest the first finding is compared: its id, operator, phase and step; of healthy ones there may be none. The table in FOLDER/corpus.json has
all findings.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from script_corpus import Case, cases

ON_CUDA = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import default_cuda\n"
PATIENCE = 240
"""Seconds for one script."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One script: how it was judged, what is not as its header says, and what was found."""

    name: str
    verdict: str
    wrong: tuple[str, ...]
    found: tuple[str, ...]
    headline: str = ""
    coverage: tuple[str, ...] = ()


def main() -> None:
    """Runs the scripts and prints those that are not as their headers say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="scripts, by name; all if none is named")
    parser.add_argument("--out", type=Path, help="folder for corpus.json")
    parser.add_argument("--jobs", type=int, default=max((os.cpu_count() or 2) - 2, 1), help="scripts at a time")
    parser.add_argument("--keep", type=Path, help="folder for the runs of scripts that are not as their headers say")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no script after that time")
    asked = parser.parse_args()
    for folder in filter(None, (asked.out, asked.keep)):
        folder.mkdir(parents=True, exist_ok=True)
    chosen = [case for case in cases() if not asked.names or case.name in asked.names]
    rows = []
    end = time.monotonic() + asked.seconds
    with ThreadPoolExecutor(asked.jobs) as pool:
        for row in pool.map(lambda case: judged(case, asked.keep) if time.monotonic() < end else None, chosen):
            if row is None:
                continue
            rows.append(row)
            if asked.out:
                (asked.out / "corpus.json").write_text(
                    json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8"
                )
            if row.verdict != "right":
                found = ", ".join(row.found) or "nothing"
                print(f"{row.verdict:<6} {row.name}: {'; '.join(row.wrong)}; found: {found}", flush=True)
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in ("right", "wrong", "other")}
    print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()) + f"; {len(chosen) - len(rows)} not run")


def judged(case: Case, keep: Path | None = None) -> Row:
    """A script run bare, then under exec, each in a fresh folder."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, case.path.name)
        program = case.path.read_text(encoding="utf-8").replace('"cpu"', '"cuda"')
        script.write_text(ON_CUDA + program, encoding="utf-8")
        for helper in case.path.parent.iterdir():
            if helper.is_dir() and not helper.name.startswith("__"):
                Path(folder, helper.name).symlink_to(helper)
        bare = ran([sys.executable, str(script)], Path(folder))
        if bare is None or ended(bare) != case.raises:
            return Row(name=case.name, verdict="other", wrong=(f"ends with {bare and ended(bare)}",), found=())
        command = [sys.executable, "-m", "dtypedoctor", "exec", "--out", "run", str(script)]
        done = ran(command, Path(folder))
        report = Path(folder, "run", "report.json")
        if done is None or not report.exists():
            return Row(name=case.name, verdict="wrong", wrong=(f"no report: {done and done.stderr[-300:]}",), found=())
        row = compared(case, json.loads(report.read_text(encoding="utf-8")))
        if keep is not None and row.verdict == "wrong":
            shutil.copytree(Path(folder, "run"), keep / case.name)
        return row


def ran(command: list[str], folder: Path) -> "subprocess.CompletedProcess[str] | None":
    """The finished command; None where it took too long."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
        "OMP_NUM_THREADS": "1",
    }
    try:
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
    except subprocess.TimeoutExpired:
        return None


def ended(bare: "subprocess.CompletedProcess[str]") -> str | None:
    """The class of the exception that ended a script; None where it ended by itself."""
    if bare.returncode == 0:
        return None
    last = bare.stderr.strip().splitlines()[-1:] or [""]
    name = last[0].partition(":")[0].rpartition(".")[2]
    return name if name.isidentifier() and "Traceback" in bare.stderr else "SystemExit"


def compared(case: Case, report: dict[str, Any]) -> Row:
    """The report beside the header."""
    findings = [f for f in report["findings"] if f["severity"] != "info" or not case.healthy]
    found = tuple(f"{f['id']} {f['fqn']} {f['op']} {f['phase']} step {f['step']} {f['confidence']}" for f in findings)
    wrong = tuple(mistakes(case, report["status"], findings))
    return Row(
        name=case.name,
        verdict="wrong" if wrong else "right",
        wrong=wrong,
        found=found,
        headline=str(report.get("headline", "")),
        coverage=tuple(map(str, report["coverage"])) if wrong else (),
    )


def mistakes(case: Case, status: str, findings: list[dict[str, Any]]) -> list[str]:
    """What of the first finding is not as the header says."""
    if case.healthy:
        return [f"false: {f['id']}" for f in findings] or ([] if status == "healthy" else [f"status {status}"])
    if not findings:
        return [f"nothing found, status {status}"]
    first = findings[0]
    wrong = [] if first["id"] in case.ids else [f"id {first['id']}"]
    for key, accepted in (("op", case.ops), ("phase", case.phases)):
        if accepted is not None and first[key] not in accepted:
            wrong.append(f"{key} {first[key]}")
    if case.step is not None and first["step"] != case.step:
        wrong.append(f"step {first['step']}")
    return wrong


if __name__ == "__main__":
    main()
