"""The loader of the script corpus refuses headers that would be read as something else than was meant."""

from pathlib import Path

import pytest
from script_corpus import matches_fqn, read_case

GOOD = {"id": "float16-overflow", "raises": "null", "family": "nonfinite", "why": "a product is too large"}


def script(folder: Path, **keys: str) -> Path:
    why = keys.pop("why")
    lines = ["# expect:", *(f"#   {key}: {value}" for key, value in keys.items()), f"# why: {why}", "", "print(1)"]
    path = folder / "one.py"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"fase": "forward"}, "unknown keys"),
        ({"family": "healthy"}, "does not go with"),
        ({"id": "null"}, "does not go with"),
        ({"born": "thin-air"}, "unknown origins"),
        ({"confidence": "proven"}, "unknown keys"),
        ({"why": "`x` is read"}, "no readable"),
    ],
)
def test_a_header_that_says_something_impossible_is_refused(change: dict[str, str], words: str, tmp_path: Path) -> None:
    """A misspelt key, a family against its id, an unknown origin and broken YAML all name the file."""
    with pytest.raises(ValueError, match=words) as error:
        read_case(script(tmp_path, **(GOOD | change)))
    assert "one.py" in str(error.value)


def test_module_names_match_from_the_right_at_a_dot() -> None:
    """A wrapper may sit above the root; half a name is no match; the root is only itself."""
    assert matches_fqn("base_model.model.blocks.1.ff", ("blocks.1.ff",))
    assert not matches_fqn("blocks.11.ff", ("1.ff",))
    assert not matches_fqn("blocks.1", ("",))
    assert matches_fqn("", ("",))
    assert matches_fqn(None, (None, "out"))
    assert not matches_fqn(None, ("out",))
