# expect: {id: norm-promotes-to-float32, family: mismatch, raises: RuntimeError}
# at: {fqn: model.layers.0.input_layernorm, op: aten.mm.default, phase: forward, step: 1,
#   raised_in: model.layers.0.self_attn.q_proj}
# born: norm
# born_fqn: model.layers.0.input_layernorm
# why: norms were lifted to float32 "for stability" and LlamaRMSNorm's output follows its weight

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(1)
config = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
lm = LlamaForCausalLM(config).to(torch.bfloat16)
for name, module in lm.named_modules():
    if "norm" in name:
        module.float()

optim = torch.optim.AdamW(lm.parameters(), lr=1e-3)
for step in range(4):
    batch = torch.randint(0, 128, (2, 24))
    loss = lm(input_ids=batch, labels=batch).loss
    loss.backward()
    optim.step()
    optim.zero_grad()
    print(step, float(loss))
