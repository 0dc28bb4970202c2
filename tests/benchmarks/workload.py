"""The training step that is timed: a Llama on random tokens."""

from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {
    "large": {"hidden_size": 2048, "num_hidden_layers": 16, "intermediate_size": 8192, "num_attention_heads": 32,
              "num_key_value_heads": 8, "vocab_size": 32000},
    "small": {"hidden_size": 1024, "num_hidden_layers": 8, "intermediate_size": 4096, "num_attention_heads": 16,
              "num_key_value_heads": 8, "vocab_size": 32000},
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 256},
}  # fmt: skip


@dataclass
class Workload:
    """A model, its optimizer and one batch."""

    model: LlamaForCausalLM
    optimizer: torch.optim.Optimizer
    tokens: torch.Tensor
    device: torch.device
    description: str

    def step(self) -> torch.Tensor:
        """One training step; the loss is not read, so that nothing waits for the device."""
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def reset_peak(self) -> None:
        """Begins to look for the highest memory use anew."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak(self) -> int:
        """Bytes of the highest memory use; 0 on a CPU, where nothing counts them so cheaply."""
        return torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0


def build_workload(device: torch.device, size: str | None, batch: int | None, length: int | None) -> Workload:
    """Builds the model in bfloat16 on CUDA and in float32 on a CPU, with weights from a fixed seed."""
    cuda = device.type == "cuda"
    size = size or ("large" if cuda else "small")
    batch, length = batch or (4 if cuda else 1), length or (1024 if cuda else 256)
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size], tie_word_embeddings=False, use_cache=False)
    dtype = torch.bfloat16 if cuda else torch.float32
    with device:
        model = LlamaForCausalLM(config).to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=cuda)
    tokens = torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(0)).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    description = (
        f"Llama {size}: {parameters / 1e9:.2f} B parameters, {config.num_hidden_layers} layers of {config.hidden_size}, "
        f"{str(dtype).removeprefix('torch.')}, {batch} × {length} tokens"
    )
    return Workload(model, optimizer, tokens, device, description)
