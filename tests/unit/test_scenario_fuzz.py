"""Whatever bytes a scenario file holds, loading it ends soon, with a scenario or with a UsageError."""

import re
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtypedoctor.errors import UsageError
from dtypedoctor.lab.scenarios.loading import available, load_scenario
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

TOKENS = [
    b"\t", b"\n", b"\r", b"\0", b"\x85", b"\xff", b"\xe2\x80\xa8", b"\xef\xbb\xbf", b"&a ", b"*a", b"<<: ", b"!!python/name:os ",
    b"!!binary ", b"---\n", b"...\n", b"%YAML 1.1\n", b"? ", b": ", b"- ", b"[", b"]", b"{", b"}", b"'", b'"', b"|", b">",
    b"#", b"@", b"`", b"%", b"\\", b'"\\uD800"', b'"\\U00110000"', b'"\\x00"', b".nan", b"1e999", b"9" * 5000, b"0x" + b"f" * 99,
    b"0o7", b"-", b"~", b"2026-04-01", b"12:30:45", b"yes", b"null", b"{a: 1}: 2", b"[" * 40, b"{a: " * 40, b"- " * 40,
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


def ends_well(content: bytes) -> Scenario | UsageError:
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


SOME = settings(max_examples=100)


@given(mutated_bytes())
@SOME
def test_a_file_with_mutated_bytes_loads_or_is_refused(content: bytes) -> None:
    """Torn, garbled and hostile files give a message with places, never a traceback, never a hang."""
    ends_well(content)


LARGE = {
    "lists": "[" * 125_000,
    "keys": "".join(f"k{i}: 1\n" for i in range(10_000)),
    "duplicate keys": "k: 1\n" * 18_000,
    "aliases": "a: [" + "*x, " * 30_000 + "]",
    "escapes": 'a: "' + "\\x41" * 30_000 + '"',
}


@pytest.mark.parametrize("text", LARGE.values(), ids=LARGE.keys())
def test_a_file_as_large_as_allowed_is_refused_soon(text: str) -> None:
    """Nothing in YAML costs more than its length in time: one that did would run into the time limit of a test."""
    assert isinstance(ends_well(text.encode()), UsageError)
