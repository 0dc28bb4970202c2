"""Writes a Llama that overflows float16 as a folder of any size, for trials on real devices: `run` and `bisect` of what one device does not hold.

    python -m tests.benchmarks.large_model FOLDER                      # 3.0 B parameters, 6 GB
    python -m tests.benchmarks.large_model FOLDER --hidden 5120 --layers 64 --intermediate 17408 --heads 40     # 21.5 B: 86 GB in float32

Weights are drawn on a GPU where there is one, seeded; in one layer the product inside of the MLP leaves float16's range. Prints seconds and
bytes. A file holds one layer, and eight are written at a time.
"""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig

VOCABULARY = 32000
KEY_VALUE_HEADS = 8
LOUD, QUIET = 300.0, 1e-3
"""Factors of the projections into the spoilt MLP, and of the one out of it."""
AT_A_TIME = 8


def main() -> None:
    """Writes the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--hidden", type=int, default=3072)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--intermediate", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--spoilt", type=int, help="layer whose MLP overflows; two thirds of the way if left out")
    options = parser.parse_args()
    began = time.perf_counter()
    config = LlamaConfig(
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=KEY_VALUE_HEADS,
        vocab_size=VOCABULARY,
        dtype="float16",
        architectures=["LlamaForCausalLM"],
    )
    options.folder.mkdir(parents=True)
    config.save_pretrained(options.folder)
    spoilt = options.spoilt if options.spoilt is not None else options.layers * 2 // 3
    with ThreadPoolExecutor(AT_A_TIME) as writers:
        parts = writers.map(lambda number: written(options.folder, config, number, spoilt), range(-1, options.layers))
        named = list(parts)
    total = sum(size for size, _ in named)
    places = {name: file for _, part in named for name, file in part.items()}
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (options.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    print(
        f"{total / 2e9:.2f} B parameters, {total / 1e9:.1f} GB in float16, layer {spoilt} overflows; {time.perf_counter() - began:.0f} s",
        flush=True,
    )


def written(folder: Path, config: LlamaConfig, number: int, spoilt: int) -> tuple[int, dict[str, str]]:
    """Writes one layer, or what is around all with number -1; its bytes, and the file of each weight."""
    weights = layer(config, number, spoilt) if number >= 0 else around(config)
    name = f"model-{number + 1:05}.safetensors"
    save_file(weights, folder / name, metadata={"format": "pt"})
    return sum(weight.numel() * 2 for weight in weights.values()), dict.fromkeys(weights, name)


def layer(config: LlamaConfig, number: int, spoilt: int) -> dict[str, Tensor]:
    """The weights of one layer by their names, in float16."""
    hidden, middle = config.hidden_size, config.intermediate_size
    narrow = hidden // config.num_attention_heads * KEY_VALUE_HEADS
    shapes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (narrow, hidden),
        "self_attn.v_proj": (narrow, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    factors = {"mlp.gate_proj": LOUD, "mlp.up_proj": LOUD, "mlp.down_proj": QUIET} if number == spoilt else {}
    drawn = {name: draw(shape, number, factors.get(name, 1.0)) for name, shape in shapes.items()}
    drawn |= {name: torch.ones(hidden, dtype=torch.float16) for name in ("input_layernorm", "post_attention_layernorm")}
    return {f"model.layers.{number}.{name}.weight": weight for name, weight in drawn.items()}


def around(config: LlamaConfig) -> dict[str, Tensor]:
    """Embedding, last norm and head."""
    shape = (VOCABULARY, config.hidden_size)
    return {
        "model.embed_tokens.weight": draw(shape, -1),
        "model.norm.weight": torch.ones(config.hidden_size, dtype=torch.float16),
        "lm_head.weight": draw(shape, -2),
    }


def draw(shape: tuple[int, int], seed: int, factor: float = 1.0) -> Tensor:
    """Normal weights with a standard deviation of 0.02 times ``factor``, on the CPU, (out, in)."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device).manual_seed(seed + 1000 * shape[0] + shape[1])
    return torch.randn(shape, generator=generator, device=device, dtype=torch.float16).mul_(0.02 * factor).cpu()


if __name__ == "__main__":
    main()
