"""What a budget costs in detection: scripts of the corpus by ``exec`` with every step measured whole, and thinned.

    python -m tests.benchmarks.budget_detection                 # every second script, thinned to 1/50 (2%) from the second step on
    python -m tests.benchmarks.budget_detection --late          # the same after 60 steps of another, healthy training

Most scripts fail in their first steps, which a budget measures whole. With ``--late`` each runs in a process in which a small model has been
trained for 60 steps, so what fails comes when all is thinned. Compared is the first finding: its id, its module and its operator.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "tests" / "e2e" / "scripts"

LATE = """
import runpy, sys, torch

def train():
    net = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    state = torch.get_rng_state()
    for _ in range(60):
        net(torch.ones(4, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.set_rng_state(state)

train()
sys.argv = sys.argv[1:]
sys.path[0] = {folder!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def main() -> None:
    """Runs each script both ways and prints how many findings are the same."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--late", action="store_true", help="after 60 steps of another training")
    parser.add_argument("--budget", default="1/50")
    parser.add_argument("--every", type=int, default=2, help="each so-many-th script")
    parser.add_argument("--first", type=int, default=0, help="number of the first script")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no script after so many")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    until = time.monotonic() + options.seconds

    def both(script: Path) -> tuple[str, Any, Any]:
        if time.monotonic() > until:
            return script.stem, None, None
        return (
            script.stem,
            _found(script, late=options.late),
            _found(script, "--overhead-budget", options.budget, late=options.late),
        )

    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(both, sorted(SCRIPTS.glob("*.py"))[options.first :: options.every]))
    done = [row for row in rows if row[1] is not None and row[2] is not None]
    failing = [row for row in done if row[1]["id"]]
    same = [row for row in failing if all(row[1][key] == row[2][key] for key in ("id", "fqn", "op"))]
    healthy = [row for row in done if not row[1]["id"]]
    print(
        f"{len(done)} of {len(rows)} scripts ran both ways; {len(failing)} with findings, {len(same)} of them with the same id, module "
        f"and operator; {sum(not row[2]['id'] for row in healthy)} of {len(healthy)} without findings have none"
    )
    for name, whole, thinned in done:
        if whole != thinned:
            print(name, json.dumps(whole), json.dumps(thinned))
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1))


def _found(script: Path, *options: str, late: bool) -> dict[str, Any] | None:
    """The first finding of a script; None where there is no report."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    with tempfile.TemporaryDirectory() as directory:
        asked = [str(script)]
        if late:
            (Path(directory) / "late.py").write_text(LATE.format(folder=str(SCRIPTS)))
            asked = ["late.py", str(script)]
        command = [sys.executable, "-m", "dtypedoctor", "exec", "--out", "run", *options, *asked]
        try:
            subprocess.run(command, cwd=directory, env=environment, capture_output=True, timeout=120, check=False)
            report = json.loads((Path(directory) / "run" / "report.json").read_text())
        except (OSError, ValueError, subprocess.TimeoutExpired):
            return None
    first = report["findings"][0] if report["findings"] else {}
    return {"status": report["status"], **{key: first.get(key) for key in ("id", "fqn", "op", "step", "phase")}}


if __name__ == "__main__":
    main()
