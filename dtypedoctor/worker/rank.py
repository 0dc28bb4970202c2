"""One rank of a scenario, as torchrun starts it: ``python -m dtypedoctor.worker.rank DIRECTORY`` serves the request in the rank's own directory there."""

import os
import sys
from pathlib import Path

from dtypedoctor.foreign_files import append_file
from dtypedoctor.trace.ranks import member_of_torchrun, rank_directory
from dtypedoctor.worker.main import leave, serve


def main(directory: Path) -> None:
    """Leaves the trace and the output of this rank in its directory.

    Raises:
        RuntimeError: the process was not started by torchrun.
    """
    here = member_of_torchrun()
    if here is None:
        raise RuntimeError("RANK and WORLD_SIZE are not set: this process was not started by torchrun")
    own = rank_directory(directory, here.rank)
    for descriptor, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        with append_file(own / name, mode=0o600) as file:
            os.dup2(file.fileno(), descriptor)
    leave(serve(own))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
