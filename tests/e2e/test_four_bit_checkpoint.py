"""A 4-bit checkpoint that was saved in float16 and is loaded as bfloat16: its files say so before any weight is read."""

import json
from pathlib import Path

import pytest
from command import in_this_process, report_of

from dtypedoctor.diagnosis.checkpoint import read_entries
from dtypedoctor.examination.examine import stand_out
from dtypedoctor.lab.scenarios.loading import load_scenario
from dtypedoctor.lab.trials.treatment import checkpoints_of

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors")
STATE = ".quant_state.bitsandbytes__nf4"

SCENARIO = """\
name: float16_states
summary: A 4-bit checkpoint with float16 quantisation states is loaded as bfloat16.
steps:
  - model: {{name: {folder}, dtype: bfloat16}}
    workload: {{kind: forward, steps: 1}}
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama that transformers quantised and saved in float16, with nested statistics."""
    from transformers import BitsAndBytesConfig, LlamaForCausalLM

    from dtypedoctor.lab.models.builtin import byte_tokenizer, llama_tiny

    dense, folder = tmp_path_factory.mktemp("dense"), tmp_path_factory.mktemp("nf4")
    llama_tiny().half().save_pretrained(dense)
    half = torch.float16
    packing = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=half
    )
    LlamaForCausalLM.from_pretrained(dense, dtype=half, quantization_config=packing).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def without_weights(saved: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint cut off behind its header and quantisation states: not one byte of a weight is left."""
    folder = tmp_path_factory.mktemp("cut")
    (folder / "config.json").write_bytes((saved / "config.json").read_bytes())
    entries = sorted(read_entries(saved / "model.safetensors"), key=lambda entry: STATE not in entry.name)
    header, contents, at = {}, b"", 0
    for entry in entries:
        size = entry.end - entry.begin
        codes = {"uint8": "U8", "float16": "F16", "float32": "F32"}
        described = {"dtype": codes[entry.dtype], "shape": entry.shape, "data_offsets": [at, at + size]}
        header[entry.name], at = described, at + size
        contents += entry.read() if STATE in entry.name else b""
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + contents)
    return folder


def scenario(path: Path, folder: Path) -> Path:
    """A scenario file that loads ``folder`` as bfloat16."""
    path.write_text(SCENARIO.format(folder=folder))
    return path


def test_the_states_are_named_where_no_weight_can_be_read(without_weights: Path, tmp_path: Path) -> None:
    """The safetensors library refuses the file; ``inspect`` and what a run checks first name its states all the same."""
    with pytest.raises(safetensors.SafetensorError):
        safetensors.safe_open(without_weights / "model.safetensors", "pt").__enter__()
    finished = in_this_process("inspect", "--json", without_weights, "--dtype", "bfloat16")
    document = json.loads(finished.out)
    assert finished.code == 10
    assert "cut short" in str(document["coverage"])
    assert document["findings"][0]["id"] == "quant-state-dtype"
    assert "quant_state.dtype: float16 in 14 weight(s)." in json.dumps(document["findings"][0])
    [found] = stand_out(checkpoints_of(load_scenario(scenario(tmp_path / "float16_states.yaml", without_weights))))
    assert (found.id, found.phase) == ("quant-state-dtype", "static")


def test_states_that_agree_with_the_dtype_are_not_named(without_weights: Path) -> None:
    """Loaded as float16 the same files are in order, as far as they are there."""
    finished = in_this_process("inspect", "--json", without_weights, "--dtype", "float16")
    assert "quant-state-dtype" not in [one["id"] for one in json.loads(finished.out)["findings"]]
    assert finished.code == 10


@pytest.mark.release
def test_a_scenario_that_loads_such_a_checkpoint_reports_it_first(saved: Path, tmp_path: Path) -> None:
    """The finding is the files' own, whatever the installed transformers makes of them when it loads them."""
    file = scenario(tmp_path / "float16_states.yaml", saved)
    finished = in_this_process("run", file, "--no-remedies", "--out", tmp_path / "out")
    assert finished.code == 10, finished.err
    first = report_of(tmp_path / "out")["findings"][0]
    assert (first["id"], first["phase"], first["dtype"]) == ("quant-state-dtype", "static", "float16")
    assert any("loaded as bfloat16" in line for line in first["evidence"])
