"""Trains a tiny Gemma-3 of transformers in bfloat16 after unsloth_zoo's patch of its attention, which a release may leave out silently.

    python zoo_gemma3.py FOLDER

FOLDER is an unpacked wheel of unsloth_zoo, or ``-`` for the one on ``sys.path``. Prints the losses.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

sys.path.insert(0, str(Path(__file__).parent))
import zoo_patches


def main(folder: str) -> None:
    """Trains for two steps."""
    zoo_patches.apply(folder, "gemma.patch_Gemma3Attention_generic")
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    model: Any = Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=256, num_hidden_layers=2, **sizes))
    for parameter in model.parameters():  # not model.to(), which would round the rotary table
        parameter.data = parameter.data.bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(32).reshape(2, 16) * 7 % 256
    for _ in range(2):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item())


if __name__ == "__main__":
    main(sys.argv[1])
