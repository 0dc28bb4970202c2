"""Two 4-bit Llamas after one another through a released unsloth's own kernels: what is said of each combination.

    python tests/benchmarks/unsloth_matrix.py DEFECT FIXED [--jobs 8]

DEFECT and FIXED are unpacked wheels of unsloth, the last with the stale dequantization buffer (2026.2.1) and the first without
(2026.3.1). With DEFECT every combination of two different dtypes, with and without autocast, of the layer sets, of LoRA and plain
4-bit, of training, evaluation and decoding has to have ``stale-dequant-buffer``, proven, first, in the second model's first layer
and in unsloth's own file; two models of one dtype, and every combination with FIXED, have to have nothing. A combination that
computes the same numbers with DEFECT as with FIXED (an operator that does not go through the buffer) has nothing to find, and is
listed as such. Prints one line a combination, and exits with 1 where anything is wrong.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

PROGRAM = Path(__file__).parents[2] / "scenarios" / "real" / "programs" / "unsloth_two_loads.py"


@dataclass(frozen=True)
class Answer:
    """How a combination ended, what was found first, and what the program printed."""

    code: int
    findings: list[dict[str, str | None]]
    printed: str

    def is_the_defect(self) -> bool:
        if not self.findings:
            return False
        first = self.findings[0]
        return (
            (self.code, first["id"], first["confidence"]) == (10, "stale-dequant-buffer", "proven")
            and ".layers.0." in (first["fqn"] or "")
            and (first["source"] or "").startswith("unsloth/kernels/")
        )


def combinations() -> list[tuple[str, ...]]:
    """The words of every combination: dtypes, autocast, layer set, LoRA or plain, and what is done with the models."""
    dtypes = list(product(("bfloat16", "float16"), repeat=2))
    uses = [("lora", "train"), ("lora", "decode"), ("plain", "evaluate"), ("plain", "decode")]
    words = product(dtypes, ((), ("autocast",)), ("attention", "mlp", "all"), uses)
    return [(*pair, *region, layers, *use) for pair, region, layers, use in words]


def answer(folder: Path, words: tuple[str, ...]) -> Answer:
    """One combination under ``dtypedoctor exec``."""
    with tempfile.TemporaryDirectory() as out:
        command = [
            sys.executable,
            "-m",
            "dtypedoctor",
            "exec",
            "--out",
            f"{out}/run",
            str(PROGRAM),
            str(folder),
            *words,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        report = Path(out, "run", "report.json")
        findings = json.loads(report.read_text())["findings"] if report.exists() else []
    return Answer(done.returncode, findings, done.stdout)


def bare(folder: Path, words: tuple[str, ...]) -> str:
    """What the combination prints by itself, and the last line of its error."""
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(folder), *words], capture_output=True, text=True, check=False
    )
    return done.stdout + "".join(done.stderr.splitlines(keepends=True)[-1:] if done.returncode else [])


def judged(defect: Path, fixed: Path, words: tuple[str, ...]) -> tuple[bool, str]:
    """Whether what was said of a combination is right, and a line about it."""
    with_defect, without = answer(defect, words), answer(fixed, words)
    quiet = (without.code, without.findings) == (0, [])
    if words[0] == words[1]:
        right, expected = (with_defect.code, with_defect.findings) == (0, []), "nothing, one dtype"
    elif bare(defect, words) == bare(fixed, words):
        right, expected = with_defect.findings == [], "nothing, the same numbers"
    else:
        right, expected = with_defect.is_the_defect(), "the defect"
    first = with_defect.findings[0] if with_defect.findings else {}
    said = " ".join(str(first.get(key)) for key in ("id", "confidence", "fqn", "source")) if first else "nothing"
    line = f"{' '.join(words)}: expected {expected}; exit {with_defect.code}, {said}"
    if not quiet:
        line += f"; FIXED exit {without.code}, {[f['id'] for f in without.findings]}"
    return right and quiet, line


def main() -> None:
    """Tries every combination, several at a time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("defect", type=Path)
    parser.add_argument("fixed", type=Path)
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--only", nargs="*", default=[], help="combinations that have all of these words")
    options = parser.parse_args()
    wanted = [words for words in combinations() if set(options.only) <= set(words)]
    wrong = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for right, line in pool.map(lambda words: judged(options.defect, options.fixed, words), wanted):
            wrong += not right
            print("right" if right else "WRONG", line, flush=True)
    print(f"{len(wanted) - wrong} of {len(wanted)} right")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
