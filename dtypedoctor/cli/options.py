"""Options that several verbs share, and the old names of options, which stay accepted."""

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["AllowCode", "Device", "EveryNSteps", "NprocPerNode", "Out", "current_name"]


MOST_PROCESSES = 64

OLD_NAMES = {
    "nproc": "nproc-per-node",
    "watch-every": "every-n-steps",
    "certify": "verify-uninstrumented",
}
"""Options by the names that they had before version 1."""


def current_name(name: str) -> str:
    """The present name of an option that is typed without its dashes; like torchrun, it takes ``_`` for ``-``."""
    plain = name.replace("_", "-")
    return OLD_NAMES.get(plain, plain)


Out = Annotated[Path | None, typer.Option("--out", help="Run directory to create.", show_default="runs/NAME-TIME")]

Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")]

AllowCode = Annotated[
    bool, typer.Option("--allow-code", help="Run code that a scenario from outside this directory names.")
]

NprocPerNode = Annotated[
    int | None,
    typer.Option(
        "--nproc-per-node", help="Run in N processes, started by torchrun.", metavar="N", min=1, max=MOST_PROCESSES
    ),
]

EveryNSteps = Annotated[
    int | None,
    typer.Option("--every-n-steps", help="Measure every module in every Nth step only; 0: never.", metavar="N", min=0),
]
