"""What ``dtypedoctor exec`` costs: every script of the corpus bare and under exec, in turns, as a user would type it.

    python tests/benchmarks/exec_cost.py                         # the whole corpus, one round
    python tests/benchmarks/exec_cost.py --rounds 3 backward_overflow_large_weights   # the best of three of one script
    python tests/benchmarks/exec_cost.py --beside ../older --every 8   # every eighth script, also with another checkout of dtypedoctor

All are fresh processes with empty working directories of their own, and dtypedoctor has its bytecode, as pip leaves it: without, each process
compiles 140 modules first, 0.3 s in dtypedoctor's own. Goals, as ratios over the bare script: with findings at most 1.5 in
the median and 2.0 at worst, healthy 1.15 and 1.4. Processor time of the process and all its children decides, because it hardly depends
on what else the machine does; the wall clock stands beside it. Forks that stand by are no children of the script: they sleep.
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
from compileall import compile_dir
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "tests" / "e2e" / "scripts"
GOALS = {"healthy": (1.15, 1.4), "with findings": (1.5, 2.0)}
"""Ratio of processor time over the bare script: in the median, at worst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds that a command took: on the wall clock, and of processor time with its children."""

    wall: float
    processor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One script: the best of its rounds, and how often exec ran it.

    Attributes:
        group: a key of :data:`GOALS`.
        beside: the same under exec of the other checkout; None where there is none.
    """

    name: str
    group: str
    bare: Times
    watched: Times
    runs: int
    beside: Times | None = None

    @property
    def ratio(self) -> float:
        """Processor time under exec over that of the bare script."""
        return self.watched.processor / self.bare.processor

    @property
    def ratio_beside(self) -> float | None:
        """The same for the other checkout."""
        return self.beside.processor / self.bare.processor if self.beside is not None else None


def main() -> int:
    """Measures the scripts that were named, all if none was, prints the table, and exits with 1 if a goal is missed."""
    options = _options()
    checkouts = [Path(checkout).resolve() for checkout in filter(None, (ROOT, options.beside))]
    _refuse_another_installation(checkouts)
    for checkout in checkouts:
        compile_dir(checkout / "dtypedoctor", quiet=1)
    rows = []
    for path in _chosen(options.scripts)[:: options.every]:
        rows.append(measured(path, options.rounds, options.beside))
        _print_row(rows[-1])
        if options.json:
            Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))
    return _print_summary(rows)


def _refuse_another_installation(checkouts: list[Path]) -> None:
    """The script's process prefers what is installed to ``PYTHONPATH``: with ``--beside`` both checkouts would measure that one.

    Raises:
        SystemExit: another dtypedoctor than each of ``checkouts`` is installed for this interpreter.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    asked = [sys.executable, "-c", "from dtypedoctor.cli import main; print(main.__file__)"]
    found = subprocess.run(asked, check=False, cwd="/", env=environment, capture_output=True, text=True).stdout.strip()
    if found and any(Path(found).parents[2] != checkout for checkout in checkouts):
        raise SystemExit(
            f"{found} would be measured instead; use an interpreter that has what dtypedoctor needs, but not itself"
        )


def measured(path: Path, rounds: int, beside: str | None = None) -> Row:
    """Runs a script bare and under exec in turns; the best of ``rounds`` of each."""
    bare, watched, other = [], [], []
    for _ in range(rounds):
        bare.append(_bare(path))
        took, group, runs = _watched(path, ROOT)
        watched.append(took)
        if beside is not None:
            other.append(_watched(path, Path(beside).resolve())[0])
    best_beside = _best(other) if other else None
    return Row(name=path.stem, group=group, bare=_best(bare), watched=_best(watched), runs=runs, beside=best_beside)


def _bare(path: Path) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        return _timed([sys.executable, str(path)], Path(folder), ROOT)


def _watched(path: Path, checkout: Path) -> tuple[Times, str, int]:
    """Time under exec, a key of :data:`GOALS`, and how often the script was started."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        took = _timed([sys.executable, "-m", "dtypedoctor", "exec", "--out", "run", str(path)], folder, checkout)
        try:
            report = json.loads((folder / "run" / "report.json").read_text())
        except OSError:
            raise SystemExit(f"{path.name}: exec left no report") from None
        group = "healthy" if report["status"] == "healthy" else "with findings"
        return took, group, sum(1 for _ in folder.glob("run/*/request.json"))


def _timed(command: list[str], folder: Path, checkout: Path) -> Times:
    path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
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
    parser.add_argument("--every", type=int, default=1, help="of those only each so-manieth")
    parser.add_argument("--beside", help="another checkout of dtypedoctor, measured in the same turns")
    parser.add_argument("--json", help="file for the numbers, rewritten after each script")
    return parser.parse_args()


def _print_row(row: Row) -> None:
    beside = f"   beside {row.ratio_beside:.2f}" if row.ratio_beside is not None else ""
    print(
        f"{row.name:<28} {row.group:<13} {row.runs} run(s)   bare {row.bare.processor:6.2f} s   exec {row.watched.processor:6.2f} s   "
        f"ratio {row.ratio:.2f}{beside}   wall {row.watched.wall / row.bare.wall:.2f}   load {os.getloadavg()[0]:.1f}",
        flush=True,
    )


def _print_summary(rows: list[Row]) -> int:
    missed = False
    for group, (median, worst) in GOALS.items():
        ratios = {row.name: row.ratio for row in rows if row.group == group}
        if not ratios:
            continue
        slowest = max(ratios, key=lambda name: ratios[name])
        middle = statistics.median(ratios.values())
        missed |= middle > median or ratios[slowest] > worst
        print(
            f"{group}: {len(ratios)} scripts, ratio {middle:.2f} in the median (goal {median}), "
            f"{ratios[slowest]:.2f} at worst (goal {worst}; {slowest})"
        )
        others = [row.ratio_beside for row in rows if row.group == group and row.ratio_beside is not None]
        if others:
            print(f"{'':<{len(group)}}  the other checkout: {statistics.median(others):.2f}, {max(others):.2f}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
