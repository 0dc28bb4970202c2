# expect: {id: router-flip, family: silent, raises: null}
# at: {fqn: [model.layers.0.mlp.gate, model.layers.0.mlp], phase: forward, step: 1}
# shows: 'tokens [0-9]+'
# why: a bfloat16 Mixtral with many experts picks other experts than its own gate in float32

import torch
from transformers import MixtralConfig, MixtralForCausalLM

torch.manual_seed(0)
config = MixtralConfig(
    vocab_size=256,
    hidden_size=48,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=32,
    num_experts_per_tok=8,
)
model = MixtralForCausalLM(config)
rotary = model.model.rotary_emb
keep = rotary.inv_freq.clone()
model = model.to(torch.bfloat16).eval()
rotary.inv_freq = keep
ids = torch.randint(0, 256, (2, 256))
with torch.no_grad():
    out = model(input_ids=ids, labels=ids)
print("tokens", ids.numel(), "loss", out.loss.item())
