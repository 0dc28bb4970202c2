"""``python -m dtypedoctor``."""

from dtypedoctor.cli.main import main

if __name__ == "__main__":
    main()
