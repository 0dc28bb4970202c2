"""Golden files: the text that a format is expected to give, as a file that a person can read."""

import os
from pathlib import Path

GOLDEN = Path(__file__).parent / "golden"


def assert_golden(name: str, text: str) -> None:
    """Compares ``text`` with the file ``golden/NAME``; with UPDATE_GOLDENS=1 in the environment it is written instead."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDENS") == "1":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), (
        f"{path} differs; look at the change, then run with UPDATE_GOLDENS=1"
    )
