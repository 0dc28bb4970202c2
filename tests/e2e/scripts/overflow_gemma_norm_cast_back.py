# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: model.layers.0.input_layernorm, op: aten._to_copy.default, phase: forward, step: 1}
# why: the norm multiplies by one plus a large learnt weight in float32 and its cast back to float16 is inf

import torch
from transformers import GemmaConfig, GemmaForCausalLM

torch.manual_seed(6)
config = GemmaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=16,
)
model = GemmaForCausalLM(config)
model.model.layers[0].input_layernorm.weight.data[5] = 60000.0
model = model.half()
opt = torch.optim.SGD(model.parameters(), lr=1e-4)
for step in range(2):
    ids = torch.randint(0, 64, (4, 20))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    print("step", step, "loss", loss.item())
