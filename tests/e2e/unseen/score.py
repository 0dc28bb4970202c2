"""Scores ``dtypedoctor exec`` on programs that nobody looks at; see README.md beside this file."""

import argparse
import json
import math
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
"""Until a run is given up; three times as many where edits are tried."""
EXEC = ["-m", "dtypedoctor"]
PATIENT = [
    "-c",
    "from dtypedoctor.examination import examine; examine.SECONDS = 600; from dtypedoctor.__main__ import main; main()",
]
"""The same command with ten minutes for edits in the place of one: on a busy machine none would be tried in that."""
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|nan|inf")


def matching(programs: Path, pattern: str, names: str) -> list[Path]:
    """The files of a pattern whose names match a regular expression."""
    return [path for path in sorted(programs.glob(pattern)) if re.fullmatch(names, path.stem)]


def record(program: Path, out: Path, *, quiet: bool, edits: bool = False) -> None:
    """Runs a program in a folder of its own, unless it was run before; with time to try edits, if they are scored."""
    place = out / program.parent.name / program.stem
    if place.exists():
        return
    with TemporaryDirectory() as folder:
        shutil.copy(program, folder)
        running = subprocess.Popen(
            [sys.executable, *(PATIENT if edits else EXEC), "exec", "--out", place, program.name],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            running.wait(3 * SECONDS if edits else SECONDS)
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


def printed(program: Path, measure: str | None, patch: Path | None = None) -> tuple[list[float], float]:
    """Runs a program bare in a folder of its own, with a patch if one is given: the numbers that it prints, and the one that is to be right; NaN without it."""
    with TemporaryDirectory() as folder:
        shutil.copy(program, folder)
        if (
            patch is not None
            and subprocess.run(
                ["patch", "-p0", "-s", "-i", patch], cwd=folder, stdout=subprocess.DEVNULL, check=False
            ).returncode
        ):
            return [], math.nan
        try:
            ended = subprocess.run(
                [sys.executable, program.name], cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return [], math.nan
    lines = [line for line in ended.stdout.splitlines() if measure is None or line.startswith(f"RESULT {measure} ")]
    last = [float(number) for number in NUMBER.findall(lines[-1])] if lines else []
    is_last = bool(last) and ended.returncode == 0
    return [float(number) for number in NUMBER.findall(ended.stdout)], last[-1] if is_last else math.nan


def near(left: float, right: float, truth: dict[str, object]) -> bool:
    """Whether two numbers are the same but for the rounding that the truth allows, 5% where it says nothing."""
    allowed = str(truth.get("tol", "0.05r"))
    share = float(allowed.removesuffix("r")) * (abs(right) if allowed.endswith("r") else 1.0)
    return abs(left - right) <= max(share, 0.0 if "tol" in truth else 2e-3)


def edit_verdict(truth: Path, out: Path) -> Iterator[str]:
    """What the edit that is shown for a failing program does, as words to count: applied literally, bare and under ``exec``."""
    reported = findings(out / truth.parent.name / truth.stem)
    patch = out / truth.parent.name / truth.stem / "do-this.patch"
    if not reported:
        return
    yield "found"
    if not patch.exists():
        return
    yield "edit shown"
    expected = json.loads(truth.read_text(encoding="utf-8"))
    program, measure = truth.with_suffix(".py"), expected.get("measure")
    before, _ = printed(program, measure)
    cured, right = printed(truth.with_name(f"{truth.stem}_cure.py"), measure)
    after, now = printed(program, measure, patch)
    yield "cures" if near(now, right, expected) else "does not cure"
    if len(before) == len(cured) == len(after):
        numbers = zip(before, cured, after, strict=True)
        if any(near(was, wanted, expected) and not near(got, wanted, expected) for was, wanted, got in numbers):
            yield "changes a right value"

    with TemporaryDirectory() as folder:
        edited = Path(folder, "edited", program.name)
        edited.parent.mkdir()
        shutil.copy(program, edited)
        subprocess.run(["patch", "-p0", "-s", "-i", patch], cwd=edited.parent, stdout=subprocess.DEVNULL, check=False)
        record(edited, out, quiet=True)
        left = findings(out / "edited" / edited.stem)
    was = {one["id"] for one in reported[:1]}
    yield (
        "no report after it"
        if left is None
        else "finding stays"
        if was & {one["id"] for one in left}
        else "finding gone"
    )


def score_edits(programs: Path, out: Path, names: str, jobs: int, *, totals: bool) -> Iterator[str]:
    """Says of how many failing programs the finding has an edit, and of how many of these it cures."""
    with ThreadPoolExecutor(jobs) as pool:
        truths = matching(programs, "*.json", names)
        verdicts = list(pool.map(lambda truth: list(edit_verdict(truth, out)), truths))
    if not totals:
        yield from (f"{truth.stem}: {', '.join(said)}" for truth, said in zip(truths, verdicts, strict=True))
    counts = Counter(word for said in verdicts for word in said)
    yield f"edits of {len(truths)}: " + ", ".join(f"{number} {what}" for what, number in counts.most_common())


def main() -> None:
    """Runs what is missing, and prints the score."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--programs", type=Path, default=PROGRAMS, help="the archive")
    parser.add_argument("--names", default=".*", help="regular expression: run and score only programs of such names")
    parser.add_argument("--edits", action="store_true", help="apply do-this.patch to each failing program, and run it")
    parser.add_argument("--totals", action="store_true", help="do not print the outcome of single programs")
    asked = parser.parse_args()
    with TemporaryDirectory() as folder, tarfile.open(asked.programs) as archive:
        programs = Path(folder, "programs")
        archive.extractall(programs, filter="data")
        out = asked.out.resolve()
        (out / "programs").mkdir(parents=True, exist_ok=True)
        (out / "healthy").mkdir(exist_ok=True)
        (out / "edited").mkdir(exist_ok=True)
        with ThreadPoolExecutor(asked.jobs) as pool:
            scripts = [path for path in matching(programs, "**/*.py", asked.names) if path.name != "check.py"]
            scripts = [path for path in scripts if path.with_suffix(".json").exists() or not asked.edits]
            list(pool.map(lambda script: record(script, out, quiet=asked.totals, edits=asked.edits), scripts))
        if asked.edits:
            print("\n".join(score_edits(programs, out, asked.names, asked.jobs, totals=asked.totals)))
        else:
            print("\n".join(score(programs, out, asked.names, totals=asked.totals)))


if __name__ == "__main__":
    main()
