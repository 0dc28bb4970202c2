# expect: {id: update-stall, family: silent, raises: null}
# at: {fqn: lora_magnitude_vector.default, op: null, phase: optimizer, step: 1}
# shows: 'magnitude 0\.0 matrices [1-9]'
# why: DoRA's magnitudes were cast to bfloat16 with all other trainables and are too large for the updates

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(8)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    initializer_range=0.4,
)
base = LlamaForCausalLM(config).to(torch.bfloat16)
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True))
for p in model.parameters():
    if p.requires_grad:
        p.data = p.data.to(torch.bfloat16)
trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
start = {name: p.detach().clone() for name, p in trainable.items()}
opt = torch.optim.AdamW(trainable.values(), lr=1e-3, weight_decay=0.0)
for step in range(5):
    ids = torch.randint(0, 64, (2, 16))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(step, loss.item())
change = {name: (p - start[name]).abs().max().item() for name, p in trainable.items()}
vectors = max(size for name, size in change.items() if "vector" in name)
print("magnitude", vectors, "matrices", f"{max(change.values()) * 1000:.1f}")
