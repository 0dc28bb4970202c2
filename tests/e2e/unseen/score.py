"""Scores ``dtypedoctor exec`` on programs that nobody looks at; see README.md beside this file."""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

PROGRAMS = Path(__file__).with_name("programs.tar.xz")
SECONDS = 300
"""Until a run is given up."""


def matching(programs: Path, pattern: str, names: str) -> list[Path]:
    """The files of a pattern whose names match a regular expression."""
    return [path for path in sorted(programs.glob(pattern)) if re.fullmatch(names, path.stem)]


def record(program: Path, out: Path, *, quiet: bool) -> None:
    """Runs a program in a folder of its own, unless it was run before."""
    place = out / program.parent.name / program.stem
    if place.exists():
        return
    with TemporaryDirectory() as folder:
        shutil.copy(program, folder)
        running = subprocess.Popen(
            [sys.executable, "-m", "dtypedoctor", "exec", "--out", place, program.name],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            running.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)
            running.wait()
            place.mkdir(exist_ok=True)
    if not quiet:
        print(program.stem, file=sys.stderr, flush=True)


def findings(place: Path) -> list[dict[str, object]] | None:
    """What was found that is more than a note; None where there is no report."""
    report = place / "report.json"
    if not report.exists():
        return None
    found = json.loads(report.read_text(encoding="utf-8"))["findings"]
    return [one for one in found if one["severity"] in ("error", "warning")]


def verdict(truth: Path, out: Path) -> str:
    """``line``: a finding at the line at fault or one where it matters; ``evidence``: one that names such a line; ``other``: others alone; ``nothing``."""
    found = findings(out / truth.parent.name / truth.stem)
    if found is None:
        return "no report"
    expected = json.loads(truth.read_text(encoding="utf-8"))
    lines = "|".join(map(str, {expected["culprit_line"], *expected["use_lines"]}))
    if any(re.search(rf":({lines})$", str(one["source"] or "")) for one in found):
        return "line"
    if any(re.search(rf":({lines})\b", json.dumps(one)) for one in found):
        return "evidence"
    return "other" if found else "nothing"


def score(programs: Path, out: Path, names: str, *, totals: bool) -> Iterator[str]:
    """Says how many of each kind were found, and which of the right programs have a finding; of those whose names match, and of single ones nothing with ``totals``."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for truth in matching(programs, "*.json", names):
        kind = json.loads(truth.read_text(encoding="utf-8"))["kind"]
        said = verdict(truth, out)
        counts[kind][said] += 1
        if said != "line" and not totals:
            yield f"{truth.stem}: {said}"
    for right in [*matching(programs, "healthy/*.py", names), *matching(programs, "*_cure.py", names)]:
        found = findings(out / right.parent.name / right.stem)
        kind = "healthy" if right.parent.name == "healthy" else "cures"
        counts[kind]["no report" if found is None else "found" if found else "nothing"] += 1
        for one in () if totals else found or ():
            yield f"{right.stem}: {one['id']} at {one['source']}"
    for kind, said in counts.items():
        yield f"{kind}: " + ", ".join(f"{number} {what}" for what, number in said.most_common())


def main() -> None:
    """Runs what is missing, and prints the score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--programs", type=Path, default=PROGRAMS, help="the archive")
    parser.add_argument("--names", default=".*", help="regular expression: run and score only programs of such names")
    parser.add_argument("--totals", action="store_true", help="do not print the outcome of single programs")
    asked = parser.parse_args()
    with TemporaryDirectory() as folder, tarfile.open(asked.programs) as archive:
        programs = Path(folder, "programs")
        archive.extractall(programs, filter="data")
        out = asked.out.resolve()
        (out / "programs").mkdir(parents=True, exist_ok=True)
        (out / "healthy").mkdir(exist_ok=True)
        with ThreadPoolExecutor(asked.jobs) as pool:
            scripts = [path for path in matching(programs, "**/*.py", asked.names) if path.name != "check.py"]
            list(pool.map(lambda script: record(script, out, quiet=asked.totals), scripts))
        print("\n".join(score(programs, out, asked.names, totals=asked.totals)))


if __name__ == "__main__":
    main()
