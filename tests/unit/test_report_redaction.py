"""What must not stand in a public ticket is not in a report."""

import io
import json
import shlex
import time
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from report_builders import mismatch, overflow
from rich.console import Console
from secret_texts import HOST, SECRETS, USER

from dtypedoctor.redaction.redact import Private, redact, short_paths
from dtypedoctor.redaction.secrets import names_a_secret, without_secrets
from dtypedoctor.report.formats import FORMATS, format_named
from dtypedoctor.report.run_document import public_run, run_document
from dtypedoctor.report.to_json import Report
from dtypedoctor.report.to_terminal import print_document


def rich_report() -> Report:
    """A report with something in every field that formats show."""
    base = overflow()
    return replace(
        base,
        findings=(*base.findings, *mismatch().findings),
        bisection={"culprits": ["model.layers.0"], "corrections": ["c"], "probes": 3, "one_minimal": True,
                   "verdicts": [{"mode": "m", "outcome": "fail", "phase": "forward", "fqn": "model", "absmax": 2.0}]},
    )  # fmt: skip


def planted(value: Any, secret: str) -> Any:
    """``value`` with ``secret`` added to every text in it, keys included; enums and registered words stay."""
    if isinstance(value, Enum):
        return value
    if isinstance(value, str):
        return f"{value} {secret}"
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: planted(getattr(value, f.name), secret) for f in fields(value)})
    if isinstance(value, Mapping):
        return {planted(key, secret): planted(item, secret) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(planted(item, secret) for item in value)
    return value


def texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif is_dataclass(value):
        for f in fields(value):
            yield from texts(getattr(value, f.name))
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from texts(key)
            yield from texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts(item)


PRIVATE = Private(users=frozenset({USER}), hosts=frozenset({HOST}))


def clean(text: str) -> str:
    return redact(text, PRIVATE)


def every_format(report: Report) -> list[tuple[str, str]]:
    stream = io.StringIO()
    print_document(run_document(report), Console(file=stream, width=200))
    return [
        ("terminal", stream.getvalue()),
        *((name, format_named(name).render(public_run(report))) for name in (one.name for one in FORMATS)),
    ]


@pytest.mark.parametrize(("text", "needle"), SECRETS, ids=range(len(SECRETS)))
def test_a_secret_in_every_field_is_redacted(text: str, needle: str) -> None:
    """The secret is planted in every text of a report, keys of mappings included."""
    report = redact(planted(rich_report(), text), PRIVATE)
    assert not [found for found in texts(report) if needle.lower() in found.lower()]


@pytest.mark.release(all_but=8)
@pytest.mark.parametrize(("text", "needle"), SECRETS, ids=range(len(SECRETS)))
def test_a_secret_in_every_field_is_in_no_format(text: str, needle: str) -> None:
    """Every format of the report is searched for it."""
    report = redact(planted(rich_report(), text), PRIVATE)
    for name, shown in every_format(report):
        assert needle not in shown, name


@pytest.mark.parametrize(
    "line",
    [
        "    BCE = -(x * torch.log(recon_x) + (1 - x) * torch.log(1 - recon_x)).sum()",
        "        next_tokens = torch.multinomial(probs, num_samples=1).squeeze(1)",
        "    next_token = torch.argmax(logits, dim=-1)",
        "L = torch.linalg.cholesky(cov)",
        "        K = x @ self.key.weight",
        "        B = x.shape[0]",
    ],
)
def test_arithmetic_and_calls_of_a_failing_line_are_shown(line: str) -> None:
    """Constants and matrices are written in capitals, and tokens are what a language model samples."""
    assert clean(line) == line


@pytest.mark.parametrize(
    "line",
    [
        "BACKUP_SERVER=blue-harbour",
        "MY_PASSWORD = hunter22",
        'token = vault.get("hunter22", 1)',
        "token = vault.get(hunter22)",
        "next_token = hunter22",
        "api_key = vault.get(hunter22)",
        "DB_PASSWORD=my.pass(hunter22)word",
        "export MY_VAR = hunter22",
        "MY_SETTING= hunter22",
        "os.environ['FOO_BAR'] = 'hunter22 phrase'",
    ],
)
def test_values_beside_telling_names_and_variables_of_a_shell_are_not(line: str) -> None:
    """Neither with spaces around the sign nor in a call."""
    assert "hunter22" not in clean(line)
    assert "blue-harbour" not in clean(line)
    assert clean(line) != line


def test_the_renderers_redact_by_themselves() -> None:
    """Whoever renders a report as it was built leaks nothing either."""
    secret = "hf_" + "aB3dE5" * 6
    for name in (one.name for one in FORMATS):
        assert secret not in format_named(name).render(public_run(planted(overflow(), secret)))


@pytest.mark.parametrize(
    "text",
    [
        "expected mat1 and mat2 to have the same dtype, but got: c10::Half != c10::BFloat16",
        "https://github.com/huggingface/transformers/commit/0123456789abcdef0123456789abcdef01234567",
        "https://github.com/unslothai/unsloth-zoo/pull/600",
        "AssertionError: BLOCK_SIZE=1024 must divide K=128, LR=1e-3, DTYPE=float16",
        '{"pad_token": "<pad>", "eos_token": "</s>", "max_new_tokens": 8}',
        "tokens per second: 13.2, per token: median is 3",
        "Unexpected token: 'float' after key: \"lr\"",
        "dtypedoctor run scenarios/gemma4_grpo_fp16.yaml --out runs/first",
        "transformers/models/gemma4/modeling_gemma4.py:1074",
        "OMP_NUM_THREADS=4 CUDA_VISIBLE_DEVICES=0 dtypedoctor run x.yaml",
        "checksum 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0ba822cd15d6c15b0f00a0",
        "loss/grad is 0.1/0.2, layers.0.mlp/down_proj, and/or, a basic operation of the bearer",
        "model.layers.0.self_attn.q_proj.lora_A.default",
        "nvidia-cudnn 9.10.2.21, driver 550.54.15",
    ],
)
def test_what_only_looks_like_a_secret_stays(text: str) -> None:
    """Redaction that eats the evidence makes a report useless."""
    assert clean(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/usr/lib/python3.11/site-packages/transformers/modeling.py:27", "transformers/modeling.py:27"),
        ("/opt/venv/lib/python3.12/asyncio/base.py:12", "asyncio/base.py:12"),
        ('File "/data/team one/train.py", line 3', 'File "train.py", line 3'),
        ("a: /x/y/z.py:12: wrong", "a: z.py:12: wrong"),
        ("cache in /home/somebody or /root", "cache in ~ or ~"),
        ("PYTHONPATH is /a/b:/c/d", "PYTHONPATH is b:d"),
        ("\\\\server\\share\\x.bin", "x.bin"),
        ("~somebody/x", "~/x"),
        ("a/relative/path.py and //x", "a/relative/path.py and //x"),
    ],
)
def test_a_path_keeps_what_a_stranger_needs(text: str, expected: str) -> None:
    """The part inside site-packages, or the file's name with its line."""
    assert short_paths(text) == expected


def test_names_that_the_report_itself_gives_away_are_replaced() -> None:
    """A report made elsewhere is redacted too: its home directories and variables tell whose it is."""
    report = redact(["/home/bertrand/x.py", "bertrand and Bertrand's box", {"variables": {"HOSTNAME": "peak7", "USER": "ada"}},
                     "ada on peak7"], PRIVATE)  # fmt: skip
    assert report[1] == "<user> and <user>'s box"
    assert report[3] == "<user> on <host>"


def test_names_that_identify_nobody_stay() -> None:
    """A user called root does not take the root module out of the report."""
    assert redact(
        "the root module on localhost", Private(users=frozenset({"root"}), hosts=frozenset({"localhost"}))
    ) == ("the root module on localhost")


def test_secrets_of_this_process_are_known_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """A password from the environment is found wherever it stands, though it looks like nothing."""
    monkeypatch.setenv("DEPLOY_PASSWORD", "correct-horse")
    assert redact("it said correct-horse twice", Private.of_this_machine()) == "it said <secret> twice"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            shlex.join(["x.py", "{'api_key': 'blue', 'lr': 3}"]),
            shlex.join(["x.py", "{'api_key': '<secret>', 'lr': 3}"]),
        ),
        (json.dumps('{"api_key": "blue"}'), json.dumps('{"api_key": "<secret>"}')),
        ("PASSWORD=\"deep 'blue' sea\" run", 'PASSWORD="<secret>" run'),
    ],
)
def test_values_in_quotes_within_quotes_are_seen(text: str, expected: str) -> None:
    """A dictionary as a shell writes it in a command line, or a string literal in a message."""
    assert clean(text) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("HF_TOKEN", True), ("--api-key", True), ("password", True), ("client_secret", True), ("authToken", True),
     ("pad_token", False), ("max_new_tokens", False), ("tokenizer", False), ("key", False), ("secretary", False)],
)  # fmt: skip
def test_names_tell_what_they_hold(name: str, expected: bool) -> None:
    """Vocabulary tokens and token counts are no secrets."""
    assert names_a_secret(name) is expected


@settings(max_examples=30)
@given(st.text(alphabet="aA1-_./:=@ \"'\\e&?<", min_size=1, max_size=6))
def test_redacting_a_long_text_takes_no_time(piece: str) -> None:
    """Patterns that go over a text again and again would hang on a name of a megabyte."""

    def seconds(length: int) -> float:
        text = piece * (length // len(piece))
        started = time.process_time()
        without_secrets(text)
        short_paths(text)
        return time.process_time() - started

    # Whatever is over at once is quick enough; else a text of eight times the length takes about eight times as long, not 64 times.
    assert any(seconds(60_000) < 1 for _ in range(3)) or seconds(480_000) < 24 * seconds(60_000)
