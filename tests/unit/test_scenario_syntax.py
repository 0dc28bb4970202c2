"""Files that are not YAML, not text or not files are refused with a place and no traceback."""

import os
from pathlib import Path

import pytest
from scenario_files import HEALTHY, mistakes, written

from dtypedoctor.errors import UsageError
from dtypedoctor.lab.scenarios.loading import LARGEST_FILE, load_scenario

SYNTAX = {
    "a tab in the indentation": (
        "a:\n\tb: 1",
        "2:1: not valid YAML: found character '\\t' that cannot start any token",
    ),
    "an unclosed list": (
        "a: [1, 2\nb: 3",
        "2:2: not valid YAML: expected ',' or ']', but got ':' (while parsing a flow sequence that starts at line 1)",
    ),
    "an escape beyond Unicode": ('a: "\\U00110000"', "1:1: not valid YAML: a number here is too large"),
    "a version of thousands of digits": (
        "%YAML 1." + "9" * 5000 + "\n---\na: 1",
        "1:1: not valid YAML: a number here is too large",
    ),
    "several documents": (
        "a: 1\n---\nb: 2",
        "2:1: not valid YAML: but found another document (expected a single document in the stream that starts at line 1)",
    ),
    "nothing": ("", "1:1: the file is empty"),
    "lists without end": ("[" * 60_000, "1:34: not valid YAML: nested deeper than 32 levels"),
}
"""One of each kind of message; the words are those of PyYAML."""


@pytest.mark.parametrize(("text", "said"), SYNTAX.values(), ids=SYNTAX.keys())
def test_what_is_not_yaml_is_told_in_plain_words(tmp_path: Path, text: str, said: str) -> None:
    """A syntax error gives one line: where reading ended, why, and where the unclosed part starts."""
    assert mistakes(written(tmp_path, text)) == [said]


REFUSED = {
    "a duplicate key": ("seed: 1\nseed: 2", "8:1: seed: duplicate key, first given at 7:1"),
    "a duplicate key inside": (
        "reference: {dtype: float32, dtype: float16}",
        "7:29: reference.dtype: duplicate key, first given at 7:13",
    ),
    "an anchor": ("seed: &a 1", "7:7: not valid YAML: aliases, anchors and tags are not accepted"),
    "an alias": ("reference: *a", "7:12: not valid YAML: aliases, anchors and tags are not accepted"),
    "a tag": ("seed: !!int 1", "7:7: not valid YAML: aliases, anchors and tags are not accepted"),
    "a Python object": (
        "seed: !!python/object/apply:os.getpid []",
        "7:7: not valid YAML: aliases, anchors and tags are not accepted",
    ),
    "a merge key": ("<<: {seed: 1}", "7:1: a key must be a word"),
    "a list as key": ("? [a]\n: 1", "7:3: a key must be a word"),
    "an escaped NUL": (
        'references: ["a\\0"]',
        "7:14: references[0]: the text holds the character U+0000, which is not accepted",
    ),
    "half a surrogate pair": (
        'references: ["\\uD800"]',
        "7:14: references[0]: the text holds the character U+D800, which is not accepted",
    ),
    "a terminal's escape": (
        'references: ["\\e[2J"]',
        "7:14: references[0]: the text holds the character U+001B, which is not accepted",
    ),
}


@pytest.mark.parametrize(("lines", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_yaml_beyond_keys_and_values_is_refused(tmp_path: Path, lines: str, said: str) -> None:
    """Whatever could hide, repeat, execute or recurse is refused at its place."""
    assert said in mistakes(written(tmp_path, f"{HEALTHY}{lines}\n"))


def test_aliases_are_never_expanded(tmp_path: Path) -> None:
    """Ten aliases of ten aliases of ten …, and a list that holds itself, cost no more than their text."""
    bomb = "a: &a [x, x]\n" + "".join(
        f"{chr(c)}: &{chr(c)} [{', '.join(['*' + chr(c - 1)] * 10)}]\n" for c in range(ord("b"), ord("z"))
    )
    assert mistakes(written(tmp_path, bomb)) == ["1:4: not valid YAML: aliases, anchors and tags are not accepted"]


BYTES = {
    "a NUL": (
        b"name: a\nsummary: b\0c\n",
        "2:1: not text in UTF-8 that YAML allows: special characters are not allowed",
    ),
    "Latin-1": (
        "name: a\nsummary: Größe\n".encode("latin-1"),
        "2:1: not text in UTF-8 that YAML allows: invalid start byte",
    ),
    "a picture": (b"\x89PNG\r\n\x1a\n", "1:1: not text in UTF-8 that YAML allows: invalid start byte"),
}


@pytest.mark.parametrize(("content", "said"), BYTES.values(), ids=BYTES.keys())
def test_what_is_not_text_is_told_by_its_first_wrong_byte(tmp_path: Path, content: bytes, said: str) -> None:
    """A wrong encoding or a control character has a line too."""
    assert mistakes(written(tmp_path, content)) == [said]


def test_a_directory_is_answered_with_its_files(tmp_path: Path) -> None:
    """Whoever gives a directory most likely means a file in it."""
    path = written(tmp_path, HEALTHY)
    with pytest.raises(UsageError) as refused:
        load_scenario(tmp_path)
    assert refused.value.message == f"{tmp_path}: this is a directory, not a scenario file"
    assert refused.value.hint == f"Give one of its files: {path}"
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError) as refused:
        load_scenario(tmp_path / "empty")
    assert refused.value.hint == "Give a YAML file."


def test_a_missing_file_is_answered_with_the_name_that_it_resembles() -> None:
    """A misspelt name leads to the shipped scenario."""
    with pytest.raises(UsageError) as refused:
        load_scenario(Path("scenarios/gemma4_grpo_fp61.yaml"))
    assert refused.value.message == (
        "scenarios/gemma4_grpo_fp61.yaml: no such file or scenario; did you mean 'gemma4_grpo_fp16'?"
    )


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """Opening a pipe that nobody writes to would hang forever."""
    path = tmp_path / "example.yaml"
    os.mkfifo(path)
    assert mistakes(path) == ["this is not a regular file"]


def test_a_file_that_is_no_directory_on_the_way_is_told(tmp_path: Path) -> None:
    """A path through a file, and a name that no file system takes, are answered with the system's reason."""
    inside = written(tmp_path, HEALTHY) / "more.yaml"
    assert mistakes(inside) == ["cannot be read: Not a directory"]
    assert mistakes(tmp_path / ("a" * 300)) == ["cannot be read: File name too long"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_told(tmp_path: Path) -> None:
    """The system's reason is passed on."""
    path = written(tmp_path, HEALTHY)
    path.chmod(0)
    assert mistakes(path) == ["cannot be read: Permission denied"]


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    """A data file given by mistake is refused by its size."""
    assert mistakes(written(tmp_path, b"#" * (LARGEST_FILE + 1))) == ["larger than 128 KiB"]


def test_a_model_folder_beside_the_file_is_found_from_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path in the file is one from the working directory, or else from the file's folder."""
    (tmp_path / "files" / "tiny").mkdir(parents=True)
    (tmp_path / "files" / "tiny" / "config.json").write_text("{}")
    file = tmp_path / "files" / "own.yaml"
    file.write_text("name: own\nsummary: A folder.\nsteps:\n  - model: {name: ./tiny}\n    workload: {kind: forward}\n")
    monkeypatch.chdir(tmp_path)
    model = load_scenario(file).steps[0].model
    assert model is not None
    assert Path(model.name).resolve() == (tmp_path / "files" / "tiny").resolve()
