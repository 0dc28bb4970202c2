"""Writes checkpoints by hand, without torch: headers, config, quantisation states."""

import json
import struct
from pathlib import Path
from typing import Any

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "U8": 1, "I64": 8}

LAYER = ("self_attn.q_proj.weight", "mlp.up_proj.weight", "input_layernorm.weight")


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], bytes | None]]) -> Path:
    """A file with tensors given as dtype, shape and bytes (zeros where None)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, content) in tensors.items():
        size = SIZES[dtype]
        for length in shape:
            size *= length
        chunk = content if content is not None else bytes(size)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(chunk)]}
        data += chunk
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def write_checkpoint(
    folder: Path, dtype: str = "BF16", *, layers: int = 2, config: dict[str, Any] | None = None, **other: str
) -> Path:
    """A checkpoint of a small decoder; ``other`` gives single tensors (``layers_0_input_layernorm_weight``) another dtype."""
    tensors: dict[str, tuple[str, list[int], bytes | None]] = {"model.embed_tokens.weight": (dtype, [8, 4], None)}
    for layer in range(layers):
        for part in LAYER:
            name = f"layers.{layer}.{part}"
            tensors[f"model.{name}"] = (other.get(name.replace(".", "_"), dtype), [4], None)
    folder.mkdir(parents=True, exist_ok=True)
    write_safetensors(folder / "model.safetensors", tensors)
    names = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": names[dtype]} | (config or {})))
    return folder


def packed(name: str, dtype: str, kind: str = "nf4") -> dict[str, tuple[str, list[int], bytes | None]]:
    """A 4-bit weight as bitsandbytes stores it, with nested statistics."""
    state = json.dumps(
        {"quant_type": kind, "blocksize": 64, "dtype": dtype, "shape": [16, 8], "nested_dtype": "float32"}
    ).encode()
    return {
        name: ("U8", [64, 1], None),
        f"{name}.absmax": ("U8", [2], None),
        f"{name}.quant_map": ("F32", [16], None),
        f"{name}.nested_absmax": ("F32", [1], None),
        f"{name}.nested_quant_map": ("F32", [256], None),
        f"{name}.quant_state.bitsandbytes__{kind}": ("U8", [len(state)], state),
    }
