"""Prints what is lost by way of ending a training: ``python tests/e2e/fault_table.py [number of kills] [cpu|cuda]``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from faults import ON_A_GPU, end, mistakes, mistakes_on_a_gpu, plans, plans_on_a_gpu, ways
from nursery import preload


def main(number: int, device: str) -> None:
    """Prints what was lost by way of ending."""
    on_gpu = device == "cuda"
    if not on_gpu:
        preload(frozenset({"torch", "transformers"}))
    table: dict[str, list[tuple[int, int, int, bool]]] = {way: [] for way in (ON_A_GPU if on_gpu else ways())}
    with tempfile.TemporaryDirectory() as folder:
        for index, plan in enumerate(plans_on_a_gpu(number // len(ON_A_GPU)) if on_gpu else plans(number, seed=7)):
            if plan.kind not in table:
                continue
            ended = end(plan, Path(folder) / str(index))
            wrong = list(mistakes_on_a_gpu(ended) if on_gpu else mistakes(ended))
            late = max(0, ended.truth.finished - ended.recorded)
            table[plan.kind].append((ended.truth.left, sum(ended.lost.values()), late, bool(wrong)))
            for line in (*wrong, *([ended.report.headline] if on_gpu else [])):
                print(plan, line, flush=True)
    print(
        "| way | times | module calls left | not in the trace | of them done by the device | mistakes |\n|---|--:|--:|--:|--:|--:|"
    )
    for way, rows in table.items():
        left, lost, late, wrong = (sum(column) for column in zip(*rows, strict=True)) if rows else (0, 0, 0, 0)
        print(f"| {way} | {len(rows)} | {left} | {lost} | {late} | {wrong} |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 220, sys.argv[2] if len(sys.argv) > 2 else "cpu")
