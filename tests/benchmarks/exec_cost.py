"""What ``dtypedoctor exec`` costs: every script of the corpus bare and under exec, in turns, as a user would type it.

    python tests/benchmarks/exec_cost.py                         # the whole corpus, one round
    python tests/benchmarks/exec_cost.py --rounds 3 backward_overflow_large_weights   # the best of three of one script

Both are fresh processes with empty working directories of their own. A script keeps the bound if exec takes at most three
times as long as Python alone and two seconds more, the second look and the report included. The wall clock decides; the
processor time of the process and all its children stands beside it, because it hardly depends on what else the machine does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "e2e" / "scripts"
FACTOR, SECONDS = 3.0, 2.0
"""The bound: exec takes at most FACTOR times the bare time plus SECONDS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds that a command took: on the wall clock, and of processor time with its children."""

    wall: float
    processor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One script: the best of its rounds, and how often exec ran it."""

    name: str
    bare: Times
    watched: Times
    runs: int

    @property
    def spent(self) -> float:
        """The part of what is allowed that exec took, on the wall clock; over 1 the bound is broken."""
        return self.watched.wall / (FACTOR * self.bare.wall + SECONDS)

    @property
    def processor_spent(self) -> float:
        """The same of processor time."""
        return self.watched.processor / (FACTOR * self.bare.processor + SECONDS)


def main() -> int:
    """Measures the scripts that were named, all if none was, prints the table, and exits with 1 if one breaks the bound."""
    options = _options()
    rows = []
    for path in _chosen(options.scripts):
        rows.append(measured(path, options.rounds))
        _print_row(rows[-1])
        if options.json:
            Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return _print_summary(rows)


def measured(path: Path, rounds: int) -> Row:
    """Runs a script bare and under exec in turns; the best of ``rounds`` of each."""
    bare, watched, runs = [], [], 0
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as folder:
            bare.append(_timed([sys.executable, str(path)], Path(alone)))
            command = [sys.executable, "-m", "dtypedoctor", "exec", "--out", "run", str(path)]
            watched.append(_timed(command, Path(folder)))
            if not (Path(folder) / "run" / "report.json").exists():
                raise SystemExit(f"{path.name}: exec left no report")
            runs = sum(1 for _ in Path(folder).glob("run/*/request.json"))
    return Row(name=path.stem, bare=_best(bare), watched=_best(watched), runs=runs)


def _timed(command: list[str], folder: Path) -> Times:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, process.returncode, usage = _waited(process.pid)
    return Times(wall=time.monotonic() - began, processor=usage.ru_utime + usage.ru_stime)


def _waited(pid: int) -> "tuple[int, int, os.struct_rusage]":  # type: ignore[name-defined]
    found, status, usage = os.wait4(pid, 0)
    return found, os.waitstatus_to_exitcode(status), usage


def _best(times: Iterable[Times]) -> Times:
    times = list(times)
    return Times(wall=min(t.wall for t in times), processor=min(t.processor for t in times))


def _chosen(names: list[str]) -> list[Path]:
    paths = sorted(SCRIPTS.glob("*.py"))
    unknown = set(names) - {path.stem for path in paths}
    if unknown:
        raise SystemExit(f"no such script in {SCRIPTS}: {', '.join(sorted(unknown))}")
    return [path for path in paths if not names or path.stem in names]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*", help="names in tests/e2e/scripts, without .py; all if none is given")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", help="file for the numbers, rewritten after each script")
    return parser.parse_args()


def _print_row(row: Row) -> None:
    print(
        f"{row.name:<28} {row.runs} run(s)   bare {row.bare.wall:6.2f} s   exec {row.watched.wall:6.2f} s   "
        f"{row.spent:4.0%} of what is allowed   processor {row.bare.processor:6.2f} s {row.watched.processor:6.2f} s "
        f"{row.processor_spent:4.0%}   load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def _print_summary(rows: list[Row]) -> int:
    broken = [row for row in rows if row.spent > 1]
    worst = max(rows, key=lambda row: row.spent)
    worst_processor = max(rows, key=lambda row: row.processor_spent)
    print(
        f"\n{len(rows) - len(broken)} of {len(rows)} within {FACTOR:g} x bare + {SECONDS:g} s; "
        f"median {statistics.median(row.spent for row in rows):.0%} of what is allowed, "
        f"worst {worst.name} {worst.spent:.0%} (wall clock), {worst_processor.name} "
        f"{worst_processor.processor_spent:.0%} (processor time)"
    )
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
