"""What is secret where a run is recorded is in no file that it leaves and in no format, whoever renders it and wherever."""

import io
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import PATIENCE
from planted_secrets import planted
from rich.console import Console
from test_saved_runs import left

from dtypedoctor.lab.cli.matrix import matrix_document, row_of
from dtypedoctor.lab.compare.compare import compare_runs
from dtypedoctor.lab.compare.document import comparison_document
from dtypedoctor.redaction.redact import (
    PRIVATE_REQUEST,
    forget_request,
    read_request,
    redact,
    without_process_secrets,
    write_request_file,
)
from dtypedoctor.redaction.secrets import Literals, names_a_secret, without_secrets
from dtypedoctor.report.document import Document
from dtypedoctor.report.files import report_of
from dtypedoctor.report.formats import FORMATS, format_named
from dtypedoctor.report.run_document import run_document
from dtypedoctor.report.surveys import environment_document
from dtypedoctor.report.to_terminal import print_document
from dtypedoctor.runner.run import open_run
from dtypedoctor.trace.reader import read_trace

PLANTED = list(planted())
NEEDLES = tuple(needle for _, needle in PLANTED)

OWN = {
    "MY_SERVICE_KEY": "velvet-otter", "SMTP_PASS": "quiet harbor", "DB_PASSWORD": "blue'moon\"rises", "CARD_PIN": "48151", "ALERT_WEBHOOK":
    "https://example.org/hook/mossy-fern", "BASIC_AUTH": "dXNlcjpub3RoaW5n", "BUILD_TOKEN": "amber.kettle", "THE_SECRET": "sleepy-walrus",
    "SENTRY_DSN": "https://copper-kite@o1.ingest/2", "DATABASE_URL": "postgres://bob:tin-whistle@db:5432/x", "CLOUD_CREDENTIALS": "paper-lantern",
    "Mixed_password": "straw-berries",
}  # fmt: skip
OWN_NEEDLES = (
    *(value for name, value in OWN.items() if name != "DATABASE_URL"),
    "tin-whistle",
    "marble-arch",
    "river-stone",
    "dusty-road",
)

RECORD = """
import json, sys
from pathlib import Path
from dtypedoctor.redaction.redact import forget_request, write_request_file
from dtypedoctor.trace.events import (Condition, Correction, End, Environment, Flow, Header, NotWatched, Observation, Op, Raised, Replay,
    Root, Site, Stage)
from dtypedoctor.trace.writer import TraceWriter

place, texts = Path(sys.argv[1]), json.load(sys.stdin)
for run in ("one", "two"):
    directory = place / run
    directory.mkdir()
    args = [*sys.argv[2:], *texts]
    workload = {"kind": "script", "path": "train.py", "module": None, "args": args}
    write_request_file(directory, json.dumps({"scenario": {"name": "x", "summary": texts[0], "steps": [{"workload": workload}],
                                                           "references": texts}}))
    assert json.loads((directory / "request.private.json").read_text())["scenario"]["steps"][0]["workload"]["args"] == args
    forget_request(directory)
    writer = TraceWriter(directory)
    n = writer.next_n
    writer.write(Header())
    writer.write(Environment(values={"python": "3.12", "versions": {"torch": "2.11.0"}, "note": texts, "variables": {}}))
    writer.write(Root(root=0, cls="Net", modules=1, dtypes={"float16": 4}))
    writer.write(Stage(n=n(), index=0, name="script", workload="script"))
    for number, text in enumerate(texts):
        writer.write(NotWatched(what=f"thing {number}", why=text))
        writer.write(Observation(n=n(), step=1, call=1, phase="forward", kind="note", values={"text": text, "nested": [{"a": text}]}))
        writer.write(Correction(n=n(), id="strict", target="x", installed=False, reason=text, proof=text))
        writer.write(Condition(n=n(), id="compile-off", effects=1, reason=text))
        writer.write(Op(n=n(), step=1, call=1, phase="forward", fqn="layer.velvet-otter", op="aten.mm.default", inputs=[], outputs=[],
                        error=text, scalars=[text], source="train.py:3"))
        writer.write(Replay(n=n(), of=1, how="float32", finite=True, absmax=None, note=text))
        writer.write(Raised(n=n(), step=1, call=1, phase="forward", type="ValueError", message=text, frames=["train.py:3 main"], modules=[]))
    writer.write(End(n=n(), outcome="raised", steps_completed=1))
    writer.close()
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs, recorded in a process that has the secrets in its environment and its arguments."""
    found = tmp_path_factory.mktemp("planted")
    texts = [text for text, _ in PLANTED] + [f"{name} was {value}" for name, value in OWN.items()]
    texts += [f"wrong {value!r}, {(value, 1)} and marble-arch or river-stone" for value in OWN.values()]
    arguments = [str(found), "-p", "marble-arch", "-u", "bob:river-stone", "--token=dusty-road", "--lr", "3e-4"]
    done = subprocess.run(
        [sys.executable, "-c", RECORD, *arguments], input=json.dumps(texts), env=os.environ | OWN, capture_output=True, text=True,
        check=False, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return found


def leaked(shown: str) -> list[str]:
    """The secrets in a text, also as JSON, HTML and XML write them."""
    return [needle for needle in (*NEEDLES, *OWN_NEEDLES) if needle in shown or json.dumps(needle)[1:-1] in shown]


def test_the_files_of_a_run_hold_no_secret(place: Path) -> None:
    """Trace and request are masked as they are written, and the trace is read back without damage."""
    for file in (place / "one").iterdir():
        assert leaked(file.read_text(errors="replace")) == [], file.name
    assert read_trace(place / "one").damage == ()


def drawn(document: Document) -> Iterator[tuple[str, str]]:
    stream = io.StringIO()
    print_document(document, Console(file=stream, width=200))
    yield "terminal", stream.getvalue()
    yield from ((style, format_named(style).render(document)) for style in (one.name for one in FORMATS))


def test_a_run_that_is_rendered_elsewhere_shows_no_secret(place: Path) -> None:
    """This process has none of the secrets in its environment."""
    report = redact(report_of(place / "one"))
    row = row_of(report, exit_code=10, seconds=1.0, path="one/report.json")
    compared = redact(compare_runs(open_run(place / "one"), open_run(place / "two"), None))
    documents = {
        "run": run_document(report),
        "matrix": matrix_document([row], [report], exit_code=10),
        "comparison": comparison_document(compared),
        "environment": environment_document(report.environment),
    }
    shown = {f"{kind} {style}": text for kind, document in documents.items() for style, text in drawn(document)}
    assert {name: found for name, text in shown.items() if (found := leaked(text))} == {}


@pytest.mark.parametrize(
    "text",
    [
        "expected mat1 and mat2 to have the same dtype, but got: c10::Half != c10::BFloat16",
        "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight",
        "Qwen2_5OmniThinkerForConditionalGeneration in transformers/models/qwen2_5_omni/modeling_qwen2_5_omni.py:1074",
        "meta-llama/Meta-Llama-3.1-8B-Instruct-GPTQ-INT4 at revision 0123456789abcdef0123456789abcdef01234567",
        "torch 2.11.0+git0123456 (commit 0123456789abcdef0123456789abcdef01234567)",
        "sm90_xmma_gemm_f16f16_f16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::Half>, std::array<char*, 3ul> >",
        "past_key_values=None, attention_mask=(2, 1, 8, 8), use_cache=True, pad_token_id=0, max_new_tokens=64",
        "size mismatch for lm_head.weight: torch.Size([32000, 4096]) against torch.Size([32064, 4096])",
        "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0ba822cd15d6c15b0f00a0, forward_pass=3, sort_key=name",
        "train.py -p 8080 --lr 3e-4 --bf16 --max-tokens 8 --tokenizer gpt2 --dtype=float16",
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16, Wav2Vec2BertForSequenceClassification, Gemma4AudioCausalConv1d",
    ],
)  # fmt: skip
def test_what_a_report_is_for_stays(text: str) -> None:
    """Names of modules and kernels, revisions, checksums, shapes and options of a training."""
    assert without_secrets(text) == text


def test_options_of_a_training_are_no_passwords() -> None:
    """``-p`` and ``-u`` are passwords only where their values may be; a number, a dtype and a path are none."""
    plain = ["train.py", "-p", "bf16", "-p", "8", "-p", "./data", "-u", "unbuffered", "--steps", "3"]
    assert without_process_secrets(plain) == plain
    secret = ["mysql", "-p", "hunter2!", "-u", "root:toor", "--api-key", "x", "--token=abc", "-u", "https://x.y"]
    assert without_process_secrets(secret) == ["mysql", "-p", "<secret>", "-u", "<secret>", "--api-key", "<secret>", "--token=<secret>", "-u", "https://x.y"]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"),
    [("MY_KEY", True), ("X_PASS", True), ("CARD_PIN", True), ("SLACK_WEBHOOK", True), ("BASIC_AUTH", True), ("KEY", True),
     ("forward_pass", False), ("sort_key", False), ("past_key", False), ("SPIN", False), ("COMPASS", False), ("MONKEYS", False)],
)  # fmt: skip
def test_names_of_variables_tell_in_capitals(name: str, expected: bool) -> None:
    """A pass over data and a key of a mapping hold nothing."""
    assert names_a_secret(name) is expected


def test_words_that_everybody_uses_are_not_masked_for_being_a_value() -> None:
    """A variable called X_KEY that is set to ``cuda`` does not take the devices out of a report."""
    assert (
        Literals(iter(["cuda", "float16", "1", "", "true", "./run"])).masked("cuda float16 1 true ./run")
        == "cuda float16 1 true ./run"
    )


def test_what_only_the_worker_is_to_read_is_the_users_alone(tmp_path: Path) -> None:
    """The whole request has mode 0600 whatever the mask, and is gone with the run; one without secrets has no second file."""
    before = os.umask(0)
    try:
        write_request_file(tmp_path, '{"args":["--token","abc"]}')
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / PRIVATE_REQUEST).stat().st_mode) == 0o600
    assert read_request(tmp_path) == b'{"args":["--token","abc"]}'
    forget_request(tmp_path)
    assert b"abc" not in read_request(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    write_request_file(other, '{"args": ["--lr", "3"]}')
    assert [file.name for file in other.iterdir()] == ["request.json"]
    assert left(tmp_path / "whole").is_dir()
