"""``python -m dtypedoctor``."""

import sys


def main() -> None:
    """Runs the command line. Nothing is imported from the working directory, where ``python -m`` would look first."""
    home = __file__.rsplit("/", 2)[0]
    if __name__ == "__main__" and not sys.flags.safe_path and sys.path[:1] != [home]:
        del sys.path[0]
    from dtypedoctor.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
