"""What checkpoints' headers say before anything is loaded. Each check has a checkpoint that fires and one that is silent."""

import json
import os
import struct
import tracemalloc
from pathlib import Path

import pytest
from checkpoints import packed, write_checkpoint, write_safetensors

from dtypedoctor.diagnosis import preflight
from dtypedoctor.diagnosis.checkpoint import Intent, kept_in_float32, read_checkpoint
from dtypedoctor.diagnosis.rule import Finding, Severity
from dtypedoctor.errors import UsageError
from dtypedoctor.report.surveys import Inspection, census
from dtypedoctor.rules.silent.rounding import rounded_to
from dtypedoctor.tensor_files import read_entries


def found(folder: Path, **intent: object) -> dict[str, Finding]:
    return {finding.id: finding for finding in preflight(read_checkpoint(folder, Intent(**intent)))}  # type: ignore[arg-type]


def test_the_census_counts_tensors_elements_and_states(tmp_path: Path) -> None:
    """Parts of quantisation states are not tensors of the model."""
    write_safetensors(tmp_path / "model.safetensors", packed("q.weight", "bfloat16") | {"norm": ("BF16", [7], None)})
    (tmp_path / "config.json").write_text('{"torch_dtype": "torch.bfloat16"}')
    counted = census(read_checkpoint(tmp_path))
    assert counted["tensors"] == {
        "bfloat16": {"tensors": 1, "elements": 7},
        "uint8": {"tensors": 1, "elements": 64},
    }
    assert counted["quant_states"] == [{"kind": "nf4", "dtype": "bfloat16", "nested": True, "weights": 1}]
    assert counted["config_dtype"] == counted["load_dtype"] == "bfloat16"


def test_inspecting_a_checkpoint_loads_no_weights(tmp_path: Path) -> None:
    """A file of 64 MB costs kilobytes of memory."""
    path = write_safetensors(tmp_path / "model.safetensors", {"w": ("F16", [4], None)})
    header = json.dumps({"w": {"dtype": "F16", "shape": [32 << 20], "data_offsets": [0, 64 << 20]}}).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + (64 << 20))
    tracemalloc.start()
    subject = read_checkpoint(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert subject.tensors[0].elements == 32 << 20
    assert peak < 1 << 20


def test_a_config_that_contradicts_the_files_is_a_warning(tmp_path: Path) -> None:
    """bfloat16 in the files, float16 in the config: the cast can make inf, and the finding says so."""
    write_checkpoint(tmp_path, "BF16", config={"dtype": "float16"})
    finding = found(tmp_path)["checkpoint-dtype-mismatch"]
    assert finding.severity is Severity.WARNING
    assert "65504" in finding.cause
    assert "7 tensor(s) in bfloat16" in finding.evidence[0]


def test_a_bfloat16_checkpoint_that_is_to_be_float16_is_a_warning_and_the_reverse_is_not(tmp_path: Path) -> None:
    """bfloat16 has float32's range, so only one direction can overflow."""
    assert "checkpoint-dtype-mismatch" in found(write_checkpoint(tmp_path / "a", "BF16"), dtype="float16")
    assert found(write_checkpoint(tmp_path / "b", "F16"), dtype="bfloat16") == {}


def test_a_part_of_the_config_that_says_something_else_is_information(tmp_path: Path) -> None:
    """A multimodal model's text_config."""
    write_checkpoint(tmp_path, config={"text_config": {"torch_dtype": "torch.float32"}})
    finding = found(tmp_path)["checkpoint-dtype-mismatch"]
    assert finding.severity is Severity.INFO
    assert "text_config" in finding.summary


@pytest.mark.parametrize(("dtype", "finding"), [("F16", "unscale-float16-gradients"), ("BF16", "scaler-bfloat16")])
def test_half_precision_weights_and_a_scaler_do_not_go_together(dtype: str, finding: str, tmp_path: Path) -> None:
    """An error with --scaler, nothing without."""
    write_checkpoint(tmp_path, dtype)
    assert found(tmp_path, scaler=True)[finding].severity is Severity.ERROR
    assert found(tmp_path) == {}
    assert found(tmp_path, scaler=True, dtype="float32") == {}


def test_a_float32_norm_in_a_bfloat16_layer_cannot_be_sharded_with_it(tmp_path: Path) -> None:
    """The unit and the odd tensor are named; an error with --fsdp only. Loading in one dtype makes it uniform."""
    write_checkpoint(tmp_path, "BF16", layers_1_input_layernorm_weight="F32")
    (tmp_path / "config.json").unlink()
    subject = read_checkpoint(tmp_path, Intent(fsdp=True))
    assert preflight(subject) == ()  # transformers loads everything in one dtype
    write_safetensors(tmp_path / "model.safetensors", packed("model.layers.0.up.weight", "bfloat16") | {"model.layers.0.norm.weight": ("BF16", [4], None)})  # fmt: skip
    finding = found(tmp_path, fsdp=True)["fsdp-mixed-dtypes"]
    assert (finding.severity, finding.fqn) == (Severity.ERROR, "model.layers.0")
    assert any("norm.weight" in line for line in finding.evidence)
    assert found(tmp_path)["fsdp-mixed-dtypes"].severity is Severity.INFO


def test_a_quantisation_state_of_another_dtype_than_the_model_is_a_warning(tmp_path: Path) -> None:
    """The state's dtype is read from the file; the model's is the requested one."""
    write_safetensors(
        tmp_path / "model.safetensors", packed("layers.0.q.weight", "float16") | {"norm": ("F16", [4], None)}
    )
    settings = {"quant_method": "bitsandbytes", "bnb_4bit_compute_dtype": "float16"}
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float16", "quantization_config": settings}))
    assert "quant-state-dtype" not in found(tmp_path)
    finding = found(tmp_path, dtype="bfloat16")["quant-state-dtype"]
    assert (finding.severity, finding.fqn, finding.dtype) == (Severity.WARNING, "layers.0.q", "float16")
    assert "compute_dtype is float16." in finding.evidence


def test_a_compute_dtype_that_differs_from_the_states_is_information(tmp_path: Path) -> None:
    """bitsandbytes itself copes with it."""
    write_safetensors(tmp_path / "model.safetensors", packed("q.weight", "float16") | {"norm": ("F16", [4], None)})
    settings = {"quant_method": "bitsandbytes", "bnb_4bit_compute_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "float16", "quantization_config": settings}))
    assert found(tmp_path)["quant-state-dtype"].severity is Severity.INFO


@pytest.mark.parametrize("method", ["awq", "gptq"])
def test_kernels_that_know_float16_only_are_told_of_in_a_bfloat16_model(method: str, tmp_path: Path) -> None:
    """Silent where the model is loaded as float16."""
    write_checkpoint(tmp_path, "BF16", config={"quantization_config": {"quant_method": method}})
    assert method in found(tmp_path)["operand-dtype-mismatch"].summary
    write_checkpoint(tmp_path, "F16", config={"quantization_config": {"quant_method": method}})
    assert found(tmp_path) == {}


FREQUENCIES = [10000.0 ** (-i / 32) for i in range(32)]


def float32_bytes(values: list[float]) -> bytes:
    """Values as they stand in a file."""
    return struct.pack(f"<{len(values)}f", *values)


def as_bfloat16(value: float) -> float:
    bits = struct.unpack("<I", struct.pack("<f", value))[0] & 0xFFFF0000
    result: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return result


def test_frequencies_that_lost_bits_are_a_warning_even_in_float32(tmp_path: Path) -> None:
    """Stored in half precision, or in float32 with the values of half precision; computed ones are silent."""
    path = tmp_path / "model.safetensors"
    tables = {
        "bfloat16": ("BF16", [32], None),
        "was bfloat16": ("F32", [32], float32_bytes([as_bfloat16(value) for value in FREQUENCIES])),
        "was float16": (
            "F32",
            [32],
            float32_bytes([struct.unpack("<e", struct.pack("<e", v))[0] for v in FREQUENCIES]),
        ),
        "computed": ("F32", [32], float32_bytes(FREQUENCIES)),
    }
    ids = {}
    for name, table in tables.items():
        write_safetensors(path, {"model.rotary_emb.inv_freq": table})  # type: ignore[dict-item]
        (tmp_path / "config.json").write_text("{}")
        ids[name] = [f.evidence[0] for f in found(tmp_path).values() if f.id == "rounded-rotary-buffer"]
    assert ids["computed"] == []
    assert "is bfloat16" in ids["bfloat16"][0]
    assert "that bfloat16 has too" in ids["was bfloat16"][0]
    assert "that float16 has too" in ids["was float16"][0]


def test_too_few_values_prove_no_rounding() -> None:
    """1.0 and 0.0 are exact in every dtype."""
    assert rounded_to((1.0, 0.0, 0.5)) is None
    assert rounded_to((0.5, 0.25)) == "bfloat16"
    assert rounded_to((1e10, 0.1)) is None


def test_a_class_that_keeps_modules_in_float32_is_read_without_importing_it(tmp_path: Path) -> None:
    """T5 keeps `wo` when it is loaded as float16, and not as bfloat16."""
    lists = kept_in_float32({"model_type": "t5"})
    assert lists == {"_keep_in_fp32_modules": ("wo",)}
    assert kept_in_float32({"model_type": "no_such_model"}) == kept_in_float32({}) == {}
    tensors = {
        "encoder.block.0.layer.1.DenseReluDense.wo.weight": ("F32", [4], None),
        "shared.weight": ("F32", [4], None),
    }
    write_safetensors(tmp_path / "model.safetensors", tensors)  # type: ignore[arg-type]
    (tmp_path / "config.json").write_text('{"model_type": "t5", "dtype": "float32"}')
    finding = found(tmp_path, dtype="float16")["norm-promotes-to-float32"]
    assert finding.severity is Severity.INFO
    assert "1 tensor(s)" in finding.summary
    assert found(tmp_path, dtype="bfloat16") == {}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a safetensors file"),
        (b"\x05\x00\x00\x00\x00\x00\x00\x00{", "a header of 5 bytes in a file of 9"),
        (struct.pack("<Q", 1 << 60) + b"{}", "not a safetensors file"),
        (struct.pack("<Q", 2) + b"[]", "not a safetensors file"),
        (struct.pack("<Q", 9) + b'{"w": {}}', "not a safetensors file"),
    ],
)
def test_a_damaged_file_is_refused_with_its_place(content: bytes, words: str, tmp_path: Path) -> None:
    """Empty, cut short, a length beyond the file, JSON of another shape."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(UsageError) as refused:
        read_entries(path)
    assert refused.value.message.startswith(f"{path}: ")
    assert words in refused.value.message


def test_what_cannot_be_looked_at_is_listed(tmp_path: Path) -> None:
    """Pickles, shards that the index names and that are not there, no config."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002.safetensors"}}')
    write_safetensors(tmp_path / "model-00001.safetensors", {"a": ("F16", [1], None)})
    gaps = " ".join(read_checkpoint(tmp_path).gaps)
    assert "pytorch_model.bin" in gaps
    assert "model-00002.safetensors" in gaps
    assert "config.json: not there" in gaps


@pytest.mark.parametrize(
    "index", [None, {"weight_map": {"a": "model-00001.safetensors"}}, "cut"], ids=["none", "named", "cut"]
)
def test_weights_that_are_not_there_are_unknown(tmp_path: Path, index: object) -> None:
    """A gate that asks for the exit code must not pass what nobody has looked at."""
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    if index == "cut":
        write_safetensors(tmp_path / "model.safetensors", {"a": ("F16", [64], None)})
        os.truncate(tmp_path / "model.safetensors", (tmp_path / "model.safetensors").stat().st_size - 8)
    elif index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    assert Inspection(subject=read_checkpoint(tmp_path), findings=()).status == "unknown"


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """The message says what is needed."""
    with pytest.raises(UsageError, match="no checkpoint here"):
        read_checkpoint(tmp_path)
