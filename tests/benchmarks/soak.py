"""A long training under the overhead budget: what the watch costs, and what memory and trace grow to, over time.

    python -m tests.benchmarks.soak --seconds 200 --out docs/images      # a CPU, or the first CUDA device

Ten steps without the watch and ninety with it take turns; of each ninety the seconds are compared with those of the tens on both sides. The
budget decides as it does in any program: the first steps are measured whole, the others as far as the budget allows. Writes ``soak.json``
after each turn, which so outlives the machine's being taken away, and draws ``soak.svg`` at the end. Steps in which the checks for silent failures look closer (1 to 4, 8, 16, 32 ...) are among those measured.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from dtypedoctor.instrument.budget import Budget, budget_of
from dtypedoctor.instrument.instruments import Instruments
from dtypedoctor.trace.events import Header
from dtypedoctor.trace.writer import TraceWriter
from dtypedoctor.worker.environment import resident
from tests.benchmarks.workload import Workload, build_workload

BARE, WATCHED = 10, 90
"""Steps of each kind in a turn."""


def main() -> None:
    """Trains, writes the numbers, draws the picture and prints a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1800.0)
    parser.add_argument("--budget", default="5%")
    parser.add_argument("--size", choices=["large", "small", "tiny"])
    parser.add_argument("--batch", type=int)
    parser.add_argument("--length", type=int)
    parser.add_argument("--out", type=Path, default=Path())
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    workload = build_workload(device, options.size, options.batch, options.length)
    budget = budget_of(options.budget)
    assert budget is not None
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    about = {"where": where, "torch": torch.__version__, "workload": workload.description, "budget": options.budget}
    options.out.mkdir(parents=True, exist_ok=True)
    left_out: list[str] = []
    turns: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        for turn in _train(workload, budget, Path(directory), options.seconds):
            turns.append(turn)
            left_out = [f"{note.what}: {note.why}" for note in budget.left_out()]
            document = {**about, "left_out": left_out, "turns": turns}
            (options.out / "soak.json").write_text(json.dumps(document, indent=1) + "\n")
    (options.out / "soak.svg").write_text(_drawn(turns, f"{where}, {workload.description}, budget {options.budget}"))
    for turn in turns:
        print(f"{turn['seconds']:7.1f} s: overhead {turn['overhead']:6.1%}, by its own count {turn['metered']:6.1%}")
    later = [turn["overhead"] for turn in turns[1:]] or [0.0]
    print(f"{where}, {workload.description}: {sum(BARE + WATCHED for _ in turns):,} steps")
    print(
        f"overhead: first {WATCHED} steps {turns[0]['overhead']:.1%}, then median {statistics.median(later):.1%}, "
        f"mean {statistics.mean(later):.1%}, largest {max(later):.1%}; of all {_mean(turns, 'overhead'):.1%}"
    )
    print(*left_out, sep="\n")


def _train(workload: Workload, budget: Budget, directory: Path, seconds: float) -> Iterator[dict[str, float]]:
    """Turns of bare and watched steps: when each ended, its overhead, and what had grown by then."""
    writer = TraceWriter(directory)
    writer.write(Header())
    instruments = Instruments(writer, budget=budget)
    for _ in range(BARE):
        workload.step()
    spent = 0.0
    began = time.perf_counter()
    before = _seconds_of(workload, BARE)
    while time.perf_counter() - began < seconds:
        instruments.start()
        watched = _seconds_of(workload, WATCHED)
        instruments.stop()
        after = _seconds_of(workload, BARE)
        bare = (before + after) / 2
        before = after
        yield {
            "seconds": round(time.perf_counter() - began, 2),
            "bare_ms": round(1e3 * bare, 2),
            "watched_ms": round(1e3 * watched, 2),
            "overhead": round(watched / bare - 1, 4),
            "memory_mib": round(resident() / 2**20, 1),
            "device_mib": round(workload.peak() / 2**20, 1),
            "metered": round((budget.spent - spent) / (bare * WATCHED), 4),
            "trace_mib": round(sum(file.stat().st_size for file in directory.iterdir()) / 2**20, 3),
        }
        spent = budget.spent
    writer.close()


def _seconds_of(workload: Workload, steps: int) -> float:
    """Seconds a step takes, in the mean of several in a row."""
    workload.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        workload.step()
    workload.synchronize()
    return (time.perf_counter() - began) / steps


def _mean(turns: Sequence[dict[str, float]], key: str) -> float:
    return statistics.mean(turn[key] for turn in turns)


def _drawn(turns: Sequence[dict[str, float]], title: str) -> str:
    """An SVG with one panel for each quantity."""
    panels = [
        ("overhead, %", [100 * turn["overhead"] for turn in turns]),
        ("host memory, MiB", [turn["memory_mib"] for turn in turns]),
        ("peak device memory, MiB", [turn["device_mib"] for turn in turns]),
        ("trace, MiB", [turn["trace_mib"] for turn in turns]),
    ]
    times = [turn["seconds"] for turn in turns]
    drawn = [_panel(name, times, values, 40 + 130 * i) for i, (name, values) in enumerate(panels)]
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="760" height="580" font-family="sans-serif" font-size="12">\n'
        '<rect width="760" height="580" fill="white"/>\n'
        f'<text x="20" y="22" font-size="13">{title}</text>\n' + "\n".join(drawn) + "\n</svg>\n"
    )


def _panel(name: str, times: Sequence[float], values: Sequence[float], top: int) -> str:
    low, high = min(values), max(values)
    low, high = min(0.0, low), max(high, 1e-9)
    last = max(times)

    def at(seconds: float, value: float) -> str:
        return f"{70 + 660 * seconds / last:.1f},{top + 100 - 90 * (value - low) / (high - low):.1f}"

    line: Any = " ".join(at(seconds, value) for seconds, value in zip(times, values, strict=True))
    return "\n".join(
        [
            f'<text x="70" y="{top + 4}" font-weight="bold">{name}</text>',
            f'<line x1="70" x2="730" y1="{top + 100}" y2="{top + 100}" stroke="#999"/>',
            f'<text x="62" y="{top + 14}" text-anchor="end">{high:.4g}</text>',
            f'<text x="62" y="{top + 104}" text-anchor="end">{low:.4g}</text>',
            f'<text x="730" y="{top + 116}" text-anchor="end">{last:.0f} s</text>',
            f'<polyline points="{line}" fill="none" stroke="#1f5fa8" stroke-width="1.5"/>',
        ]
    )


if __name__ == "__main__":
    main()
