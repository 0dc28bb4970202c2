"""Whatever bytes a scenario file holds, loading it ends soon, with a scenario or with a UsageError."""

import re
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from dtypedoctor.errors import UsageError
from dtypedoctor.lab.scenarios.loading import available, json_schema, load_scenario
from dtypedoctor.lab.scenarios.model import Scenario

EVERY_PART = """\
name: example
summary: "Every part once."
references: [https://example.org/1, 'b']
device: cpu
seed: 0x10
time_limit: 60
deterministic: true
corrections:
  - {id: some-correction, modules: [model.layers.0]}
remedies: [bfloat16]
reference: {dtype: float32, autocast: false}
expect: {findings: [float16-overflow], cured_by: [bfloat16], not_cured_by: []}
steps:
  - name: first
    model:
      name: builtin:llama-tiny
      dtype: float16
      outliers: [{parameters: "*.weight", scale: 5.5e+2}]
      lora: {r: 4, alpha: 8, dropout: .1, targets: [q_proj], dora: false}
      quantization: {kind: nf4, compute_dtype: bfloat16, nested: true, skip: [lm_head]}
      attention: ~
      options: {layers: 2, deep: {list: [1, [2, {x: null}]]}}
    workload: {kind: grpo, steps: 2, beta: 0.1}
    autocast: {dtype: bfloat16}
    compile: {backend: eager, dynamic: null}
  - workload: {kind: unload}
  - workload:
      kind: script
      path: >-
        train.py
      args: ["--a", 'b']
"""

SEEDS = [EVERY_PART, *(path.read_text().replace(path.stem, "example") for path in available())]
PARSED = [yaml.safe_load(seed) for seed in SEEDS]

TOKENS = [
    b"\t", b"\n", b"\r", b"\0", b"\x85", b"\xff", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"&a ", b"*a", b"<<: ", b"!!python/name:os ",
    b"!!binary ", b"---\n", b"...\n", b"%YAML 1.1\n", b"? ", b": ", b"- ", b"[", b"]", b"{", b"}", b"'", b'"', b"|", b">",
    b"#", b"@", b"`", b"%", b"\\", b'"\\uD800"', b'"\\U00110000"', b'"\\x00"', b".nan", b"1e999", b"9" * 5000, b"0x" + b"f" * 99,
    b"0o7", b"-", b"~", b"2026-04-01", b"12:30:45", b"yes", b"null", b"{a: 1}: 2", b"[" * 40, b"{a: " * 40, b"- " * 40,
]  # fmt: skip

JUNK: list[Any] = [
    None, True, "", "yes", "\n", "é\u2028", "x" * 2000, 0, -1, 2**31, 2**64, 10**30, 0.0, -0.5, 1e308, [], [[]], {}, {"a": {}},
    {"kind": "grpo"}, {"kind": "grop", "stpes": 1}, {1: 2}, {None: None}, ["a", 1, None],
]  # fmt: skip


@st.composite
def mutated_bytes(draw: st.DrawFn) -> bytes:
    """A scenario's bytes with parts cut out, repeated, moved, replaced or filled with what YAML stumbles over."""
    data = draw(st.sampled_from(SEEDS)).encode()
    random = Random(draw(st.integers(0, 2**32)))
    for _ in range(random.choice((1, 1, 2, 8))):
        start = random.randint(0, len(data))
        end = min(len(data), start + random.choice((0, 0, 1, 5, 40)))
        middle = random.choice((random.choice(TOKENS), b"", data[start:end] * 2, bytes([random.randrange(128)])))
        data = data[:start] + middle + data[end:]
    return data[: random.randint(0, len(data))] if random.random() < 0.1 else data


@st.composite
def mutated_values(draw: st.DrawFn) -> str:
    """A scenario's values with keys misspelt, lost, doubled and moved, and values replaced by others."""
    top = deepcopy(draw(st.sampled_from(PARSED)))
    random = Random(draw(st.integers(0, 2**32)))
    for _ in range(random.choice((1, 1, 2, 6))):
        _mutate(random, random.choice([container for container in _containers(top) if container] or [{"a": 1}]))
    return yaml.safe_dump(top, sort_keys=False, default_flow_style=random.choice((True, False, None)))


def _containers(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _containers(inner)


def _mutate(random: Random, container: Any) -> None:
    junk = deepcopy(random.choice(JUNK))
    place = random.choice(list(container) if isinstance(container, dict) else range(len(container)))
    match random.randrange(4):
        case 0:
            container[place] = junk
        case 1:
            del container[place]
        case 2 if isinstance(container, dict):
            letters = list(str(place))
            letters.insert(random.randint(0, len(letters)), random.choice("aeiou_- \t."))
            container["".join(letters)] = container.pop(place)
        case _:
            container[place] = [container[place], junk, container[place]]  # dumped with an anchor and an alias


def ends_well(content: bytes) -> Scenario | UsageError:
    """Loads the content; asserts that the message has the promised form."""
    with TemporaryDirectory() as directory:
        path = Path(directory) / "example.yaml"
        path.write_bytes(content)
        result = _loaded(path)
        if isinstance(result, UsageError):
            form = re.compile(re.escape(str(path)) + r":(\d+:\d+: .+| and \d+ more mistakes)")
            assert all(form.fullmatch(line) for line in result.message.split("\n")), result.message
        return result


def _loaded(path: Path) -> Scenario | UsageError:
    try:
        return load_scenario(path)
    except UsageError as refused:
        return refused


VALIDATOR = Draft202012Validator(json_schema())


def survives(text: str) -> None:
    """As :func:`ends_well`, and no editor underlines what loads."""
    loaded = ends_well(text.encode())
    if isinstance(loaded, Scenario):
        VALIDATOR.validate(loaded.model_dump(mode="json"))


ANY_BYTES = st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass"))
SOME = settings(max_examples=100)
MANY = settings(max_examples=3500)


@given(mutated_bytes())
@SOME
def test_a_file_with_mutated_bytes_loads_or_is_refused(content: bytes) -> None:
    """Torn, garbled and hostile files give a message with places, never a traceback, never a hang."""
    ends_well(content)


@given(mutated_values())
@SOME
def test_a_file_with_mutated_values_loads_or_is_refused(text: str) -> None:
    """Well-formed YAML that is no scenario gives a message with places."""
    survives(text)


@given(ANY_BYTES)
@SOME
def test_any_bytes_load_or_are_refused(content: bytes) -> None:
    """The same for files that never were scenarios."""
    ends_well(content)


@pytest.mark.release
@pytest.mark.timeout(3000)
@given(mutated_bytes(), mutated_values(), ANY_BYTES)
@MANY
def test_thousands_of_files_load_or_are_refused(content: bytes, text: str, anything: bytes) -> None:
    """3,500 of each kind."""
    ends_well(content)
    survives(text)
    ends_well(anything)


LARGE = {
    "lists": "[" * 125_000,
    "lists on lines": "[\n" * 60_000,
    "mappings": "{a: " * 30_000,
    "complex keys": "? " * 60_000,
    "dashes": "- " * 60_000,
    "keys": "".join(f"k{i}: 1\n" for i in range(10_000)),
    "duplicate keys": "k: 1\n" * 18_000,
    "aliases": "a: [" + "*x, " * 30_000 + "]",
    "anchors": "".join(f"a{i}: &a{i} 1\n" for i in range(7_000)),
    "escapes": 'a: "' + "\\x41" * 30_000 + '"',
    "a long text": "a: >\n" + " x\n\n" * 30_000,
    "a long key": "a" * 125_000 + ": 1",
    "misspelt steps": "steps:\n" + "- {workload: {kind: grpo, stps: x}}\n" * 3_000,
}


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE.keys())
def test_a_file_as_large_as_allowed_is_refused_soon(text: str) -> None:
    """Nothing in YAML costs more than its length in time: one that did would run into the time limit of a test."""
    assert isinstance(ends_well(text.encode()), UsageError)
