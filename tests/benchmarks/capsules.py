"""What becomes of the failing scripts of the corpus as capsules: one run each, then a replay without the script.

    python tests/benchmarks/capsules.py                     # the whole corpus
    python tests/benchmarks/capsules.py fully_masked_row_grammar_mask     # some scripts
    python tests/benchmarks/capsules.py --every 4           # each fourth
    python tests/benchmarks/capsules.py --keep FOLDER       # leaves the runs there

For each script it says whether there is a capsule, whether a replay in a process of its own, in an empty directory, comes to the same finding and
operator, how large the capsule is, and how long its script.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "e2e"))

from exec_corpus import treat_forked
from nursery import preload
from script_corpus import Case, cases

from dtypedoctor.errors import UsageError
from dtypedoctor.replay.capsule import Capsule, NoCapsule
from dtypedoctor.replay.script import CannotBeWrittenError, capsule_script
from dtypedoctor.runner.launch import Launcher
from dtypedoctor.trials.capsules import same_verdict, scenario_of
from dtypedoctor.trials.treatment import Plan, treat

ONE_RUN = Plan(certify=False, closer=False, only=frozenset())


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One script.

    Attributes:
        why: why there is no capsule, or how its replay differs; empty where it comes to the same verdict.
        size: bytes of the capsule; 0 where there is none.
        lines: lines of the script made of it; 0 where there is none.
    """

    name: str
    why: str
    size: int = 0
    lines: int = 0


def main() -> int:
    """Measures, and prints a line for each script and the totals."""
    options = _options()
    chosen = [case for case in cases() if not case.healthy and (not options.scripts or case.name in options.scripts)]
    rows = []
    for case in chosen[:: options.every]:
        preload(case.imports)
        with tempfile.TemporaryDirectory() as folder:
            place = Path(options.keep) / case.name if options.keep else Path(folder) / case.name
            place.mkdir(parents=True)
            rows.append(measured(case, place))
        print(
            f"{rows[-1].name:<28} {rows[-1].size:>10,} B {rows[-1].lines:>5}  {rows[-1].why or 'same verdict'}",
            flush=True,
        )
    same = [row for row in rows if not row.why]
    kept = [row for row in rows if row.size]
    print(f"\n{len(rows)} scripts, {len(kept)} capsules, {len(same)} of them replay to the same verdict")
    if kept:
        print(
            f"median {statistics.median(row.size for row in kept):,.0f} bytes, largest {max(row.size for row in kept):,}"
        )
        print(f"median {statistics.median(row.lines for row in kept):.0f} lines")
    return 0


def measured(case: Case, folder: Path) -> Row:
    """Runs a script once in ``folder`` and replays its capsule."""
    treatment = treat_forked(case.path, folder, ONE_RUN)
    capsule = treatment.capsule
    if not isinstance(capsule, Capsule):
        why = capsule.why if isinstance(capsule, NoCapsule) else "nothing was found"
        first = treatment.findings[0].id if treatment.findings else "-"
        return Row(name=case.name, why=f"[{first}] {why}")
    scenario = scenario_of(capsule, [], allow_code=True)
    place = folder / "replay"
    place.mkdir()
    with Launcher(place / "server.log") as launcher:
        plan = Plan(certify=False, remedies=False)
        try:
            replayed = treat(scenario, lambda label, request: launcher.run(request, place / label), plan)
            said = same_verdict(capsule, replayed.findings)
        except UsageError as error:
            said = error.message
    try:
        lines = len(capsule_script(capsule, inline=True).splitlines())
    except CannotBeWrittenError as error:
        return Row(name=case.name, why=str(error), size=capsule.bytes)
    return Row(name=case.name, why="" if said.startswith("Same") else said, size=capsule.bytes, lines=lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scripts", nargs="*")
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--keep")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
