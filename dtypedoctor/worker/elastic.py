"""torchrun itself, with what became of the processes written down. Run by its path; imports nothing of this package.

``python elastic.py RESULT ARGUMENTS…`` does what ``torchrun ARGUMENTS…`` does. If processes fail, ``RESULT`` holds, by rank,
the exit status of each that torchrun saw fail (minus the signal that ended it) and when, in seconds since the epoch.
"""

import json
import sys
from pathlib import Path


def main(result: Path, arguments: list[str]) -> int:
    """Runs torchrun; 1 if a process has failed, with torchrun's own account of it on stderr."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    try:
        run(parse_args(arguments))
    except ChildFailedError as error:
        failures = {
            str(rank): {"code": failure.exitcode, "time": failure.timestamp} for rank, failure in error.failures.items()
        }
        result.write_text(json.dumps(failures), encoding="utf-8")
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
