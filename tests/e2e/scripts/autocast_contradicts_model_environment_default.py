# expect: {id: autocast-contradicts-model, family: silent, raises: null}
# at: {fqn: null, op: null, phase: static}
# shows: 'weights torch\.bfloat16 region torch\.float16'
# why: the region's dtype comes from an environment default, float16, the model's weights are bfloat16

import os

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

NAMES = {"fp16": torch.float16, "bf16": torch.bfloat16}
region = NAMES[os.environ.get("MINUTES_PRECISION", "fp16")]

torch.manual_seed(10)
config = Qwen2Config(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = Qwen2ForCausalLM(config).to(torch.bfloat16)
weights = next(model.parameters()).dtype
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(4):
    ids = torch.randint(0, 100, (2, 16))
    with torch.autocast("cpu", dtype=region):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step} loss {loss.item():.3f} weights {weights} region {region}")
