"""What watching a training step costs: the doctor beside what else there is, on one model, in one process, interleaved.

    python -m tests.benchmarks.watch_cost                      # a CPU, or the first CUDA device
    python -m tests.benchmarks.watch_cost --batch 16 --rounds 8

Every variant runs the same step (forward, backward, optimizer) on the same model. The variants take turns in rounds, in
another order each time; a round of a variant is one step that is not timed and a few that are. The table gives the median
of all timed steps, its ratio to the untouched step, and the ratio between two untouched variants as the noise.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path

import torch
import transformers

from tests.benchmarks.variants import VARIANTS, Variant
from tests.benchmarks.workload import Workload, build_workload


def main() -> int:
    """Runs the variants that were asked for and prints the table."""
    options = _options()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.threads:
        torch.set_num_threads(options.threads)
    workload = build_workload(device, options.size, options.batch, options.length)
    variants = [make(workload) for name, make in VARIANTS.items() if options.only is None or name in options.only]
    _describe(workload, options)
    for variant in variants:
        _warm_up(workload, variant, options.warm_up or (34 if device.type == "cuda" else 9))
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for number in range(options.rounds):
        for variant in variants[number % len(variants) :] + variants[: number % len(variants)]:
            if variant.slow and number >= options.slow_rounds:
                continue
            times[variant.name] += _round(workload, variant, 1 if variant.slow else options.steps)
    rows = [_row(variant, times[variant.name], times["untouched"]) for variant in variants]
    _print(rows)
    if options.json:
        Path(options.json).write_text(json.dumps({"what": sys.argv[1:], "rows": rows}, indent=1))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", help="cpu or cuda; CUDA where there is one")
    parser.add_argument("--size", choices=["large", "small", "tiny"], help="large on CUDA, small on a CPU")
    parser.add_argument("--batch", type=int, help="sequences in a step (4 on CUDA, 1 on a CPU)")
    parser.add_argument("--length", type=int, help="tokens in a sequence (1024 on CUDA, 256 on a CPU)")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a variant in one round")
    parser.add_argument("--slow-rounds", type=int, default=4, help="rounds of variants that take several times as long")
    parser.add_argument(
        "--warm-up", type=int, help="steps of the doctor before anything is timed (34 on CUDA, 9 on a CPU)"
    )
    parser.add_argument("--threads", type=int, help="threads of a CPU")
    parser.add_argument("--only", nargs="+", choices=list(VARIANTS), help="variants to run (with untouched)")
    parser.add_argument("--json", help="file for the numbers")
    options = parser.parse_args()
    if options.only is not None and "untouched" not in options.only:
        options.only.append("untouched")
    return options


def _warm_up(workload: Workload, variant: Variant, steps: int) -> None:
    """Runs what is only done now and then in a long run: the doctor looks closer at steps 1 to 4, 8, 16, 32, 64 and so on."""
    if variant.doctor:
        with variant.active():
            for _ in range(steps):
                workload.step()
            workload.synchronize()


def _round(workload: Workload, variant: Variant, steps: int) -> list[float]:
    found = []
    with variant.active():
        workload.step()
        workload.synchronize()
        workload.reset_peak()
        for _ in range(steps):
            began = time.perf_counter()
            workload.step()
            variant.host.append(time.perf_counter() - began)
            workload.synchronize()
            found.append(time.perf_counter() - began)
        variant.peak = max(variant.peak, workload.peak())
    return found


def _row(variant: Variant, times: list[float], untouched: list[float]) -> dict[str, object]:
    median = statistics.median(times)
    return {
        "variant": variant.name,
        "ms": round(median * 1e3, 2),
        "ratio": round(median / statistics.median(untouched), 3),
        "host_ms": round(statistics.median(variant.host) * 1e3, 2),
        "fastest_ratio": round(min(times) / min(untouched), 3),
        "steps": len(times),
        "peak_mib": round(variant.peak / 2**20),
        **variant.counts(),
    }


def _describe(workload: Workload, options: argparse.Namespace) -> None:
    where = (
        torch.cuda.get_device_name() if workload.device.type == "cuda" else platform.processor() or platform.machine()
    )
    print(
        f"{where}, torch {torch.__version__}, transformers {transformers.__version__}, Python {platform.python_version()}"
    )
    print(
        f"{workload.description}; {options.rounds} rounds of {options.steps} steps, {torch.get_num_threads()} threads\n"
    )


def _print(rows: list[dict[str, object]]) -> None:
    columns = [
        "variant",
        "ms",
        "ratio",
        "fastest_ratio",
        "host_ms",
        "steps",
        "peak_mib",
        "syncs",
        "trace_bytes",
        "records",
    ]
    table = [columns] + [[str(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in table) for i in range(len(columns))]
    for line in table:
        print(
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
        )


if __name__ == "__main__":
    sys.exit(main())
