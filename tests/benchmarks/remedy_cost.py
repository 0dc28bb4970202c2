"""What the remedies cost: step time and peak memory in the trials of the scenarios, as the table in docs/remedies.md.

    python tests/benchmarks/remedy_cost.py runs/cost --rounds 3     # runs every scenario that something cures, three times
    python tests/benchmarks/remedy_cost.py runs/cost                # the table of what lies there

A figure is a ratio of two runs of one round, both watched: the trial of a remedy that cures, and the untreated run where that
lives long enough to be timed, else the scenario's reference, which computes in another dtype.
"""

import argparse
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from dtypedoctor.scenario.loading import load_scenario
from dtypedoctor.text import counted
from dtypedoctor.trials.remedies import remedies

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """One trial: its step time and its peak memory over those of ``base``."""

    scenario: str
    base: str
    step_time: float
    peak_memory: float


def run(folder: Path, rounds: int) -> None:
    """Runs every scenario that something cures into ``folder``, one directory a round."""
    cured = [path for path in sorted(SCENARIOS.glob("*.yaml")) if load_scenario(path).expect.cured_by]
    for number in range(1, rounds + 1):
        command = [sys.executable, "-m", "dtypedoctor", "run", *map(str, cured), "--out", str(folder / str(number))]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=False)  # 10 is a report too


def read(folder: Path) -> Mapping[str, list[Cost]]:
    """The costs of every remedy that has cured something in ``folder``."""
    found: dict[str, list[Cost]] = defaultdict(list)
    for path in sorted(folder.glob("*/*/report.json")):
        for remedy, cost in _costs(path):
            found[remedy].append(cost)
    return found


def _costs(path: Path) -> Iterator[tuple[str, Cost]]:
    report = json.loads(path.read_text(encoding="utf-8"))
    for trial in report["trials"]:
        time, memory = trial["step_time_ratio"], trial["peak_memory_ratio"]
        if trial["outcome"] == "fixed" and time is not None and memory is not None:
            yield (
                trial["remedy"],
                Cost(scenario=report["name"], base=trial["ratio_base"], step_time=time, peak_memory=memory),
            )


def table(found: Mapping[str, list[Cost]]) -> Iterator[str]:
    """A Markdown table, in the order in which the program lists its remedies; each kind of base has a row of its own."""
    yield "| remedy | step time | peak memory | beside |"
    yield "| --- | --- | --- | --- |"
    for remedy in remedies():
        for base in sorted({cost.base for cost in found.get(remedy, ())}):
            costs = [cost for cost in found[remedy] if cost.base == base]
            words = "the untreated run" if base == "before" else "the reference"
            number = f"{counted(len({cost.scenario for cost in costs}), 'scenario')}, {counted(len(costs), 'trial')}"
            time, memory = _spread(c.step_time for c in costs), _spread(c.peak_memory for c in costs)
            yield f"| `{remedy}` | {time} | {memory} | {words} ({number}) |"


def _spread(values: Iterable[float]) -> str:
    ordered = sorted(values)
    return f"{median(ordered):.2f}× ({ordered[0]:.2f}–{ordered[-1]:.2f})"


def main() -> None:
    """Runs what was asked for, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the runs lie")
    parser.add_argument("--rounds", type=int, default=0, help="rounds to run first")
    options = parser.parse_args()
    run(options.folder, options.rounds)
    print("\n".join(table(read(options.folder))))


if __name__ == "__main__":
    main()
