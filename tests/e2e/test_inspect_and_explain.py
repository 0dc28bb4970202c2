"""``dtypedoctor inspect`` and ``dtypedoctor explain`` through the real command line."""

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from command import in_this_process
from patience import PATIENCE, read_to_end
from safetensors.torch import save_file

from dtypedoctor.diagnosis import finding_ids


def checkpoint(folder: Path, dtype: torch.dtype, config_dtype: str) -> Path:
    """A checkpoint written by the real library."""
    folder.mkdir()
    tensors = {
        "model.layers.0.up.weight": torch.ones(4, 4, dtype=dtype),
        "model.norm.weight": torch.ones(4, dtype=dtype),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": config_dtype}))
    return folder


def test_a_contradicting_checkpoint_exits_with_ten_and_says_why(tmp_path: Path) -> None:
    """The census, the finding, its evidence, and what to type next."""
    finished = in_this_process("inspect", checkpoint(tmp_path / "model", torch.bfloat16, "float16"))
    assert finished.code == 10
    assert re.search(r"^  bfloat16 +2 +20 +stored", finished.out, re.MULTILINE)
    assert "WARNING checkpoint-dtype-mismatch" in finished.out
    assert "Next\n  dtypedoctor explain checkpoint-dtype-mismatch" in finished.out


def test_an_ordinary_checkpoint_exits_with_zero_and_in_json_too(tmp_path: Path) -> None:
    """The JSON holds model, status, census, findings and coverage."""
    folder = checkpoint(tmp_path / "model", torch.float16, "float16")
    assert in_this_process("inspect", folder).code == 0
    finished = in_this_process("inspect", "--json", folder, "--scaler")
    document = json.loads(finished.out)
    assert finished.code == 10
    assert document["status"] == "findings"
    assert document["census"]["tensors"] == {"float16": {"tensors": 2, "elements": 20}}
    assert [one["id"] for one in document["findings"]] == ["unscale-float16-gradients"]
    assert document["coverage"] == []


def test_a_real_4_bit_checkpoint_tells_its_quantisation_states(tmp_path: Path) -> None:
    """As bitsandbytes and transformers write it; the states' dtype comes out of the file."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    packed, state = bitsandbytes.functional.quantize_4bit(
        torch.randn(64, 64, dtype=torch.float16), quant_type="nf4", compress_statistics=True
    )
    tensors = {"model.layers.0.q.weight": packed, "model.norm.weight": torch.ones(4, dtype=torch.bfloat16)}
    tensors |= {f"model.layers.0.q.weight.{name}": value for name, value in state.as_dict(packed=True).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"dtype": "bfloat16"}')
    finished = in_this_process("inspect", tmp_path)
    assert finished.code == 10
    assert "1 nf4 weights, quant_state.dtype float16, nested statistics" in finished.out
    assert "WARNING quant-state-dtype" in finished.out


def test_a_builtin_model_is_built_by_a_worker() -> None:
    """Its dtypes in memory are counted."""
    finished = in_this_process("inspect", "--json", "builtin:gemma4-tiny", "--dtype", "float32")
    document = json.loads(finished.out)
    assert finished.code == 0, finished.out
    assert set(document["census"]["tensors"]) == {"float32"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], ("nowhere: neither a checkpoint nor a model in",)),
        (["--dtype", "float17", "."], ("'float17' is not a dtype", "bfloat16")),
        (["."], ("no checkpoint here",)),
    ],
)
def test_what_cannot_be_inspected_is_refused(arguments: list[str], words: tuple[str, ...], tmp_path: Path) -> None:
    """Exit 2, one message, no traceback."""
    finished = in_this_process("inspect", *arguments, cwd=tmp_path)
    assert finished.code == 2
    assert "Traceback" not in finished.err
    assert all(word in finished.err for word in words), finished.err


def test_explain_prints_the_page_of_every_finding_without_its_front_matter() -> None:
    """One page through the command, all of them the same way in this process."""
    finished = in_this_process("explain", "float16-overflow")
    assert finished.code == 0
    assert finished.out.startswith("# An operator's result left the range of float16\n")
    assert "## How to fix it" in finished.out
    listed = in_this_process("explain").out
    assert all(finding in listed for finding in finding_ids())


def test_explain_refuses_an_unknown_finding_and_names_the_one_that_may_be_meant() -> None:
    """A typing mistake."""
    finished = in_this_process("explain", "float16-overfow")
    assert finished.code == 2
    assert "float16-overflow" in finished.err


def test_help_imports_nothing_heavy() -> None:
    """Neither torch nor pydantic is loaded for it."""
    code = (
        "import sys\nfrom dtypedoctor.cli.main import with_verb\n"
        "try:\n    with_verb('')(['--help'], standalone_mode=False)\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('torch', 'pydantic', 'transformers', 'numpy') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert done.stderr.strip() == "[]"
    assert "exec" in done.stdout


def test_explain_draws_the_page_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headings without their signs, tables with lines; through the pager that the environment names."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "PAGER": "cat", "TERM": "xterm-256color", "COLUMNS": "100"}
    command = [sys.executable, "-m", "dtypedoctor", "explain", "float16-overflow"]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment):
        os.close(theirs)
        written = read_to_end(ours)
    os.close(ours)
    shown = re.sub(r"\x1b\[[0-9;]*m|\x1b\]8;[^\x1b]*\x1b\\\\", "", written.decode())
    assert "How to fix it" in shown
    assert not re.search(r"^#+ ", shown, re.MULTILINE)


def test_nothing_is_proposed_to_be_explained_where_nothing_is_found(tmp_path: Path) -> None:
    """No placeholder to be typed."""
    finished = in_this_process("inspect", checkpoint(tmp_path / "model", torch.float16, "float16"))
    assert finished.code == 0
    assert "explain" not in finished.out
