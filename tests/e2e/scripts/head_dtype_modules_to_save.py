# expect: {id: head-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: lm_head, op: aten.mm.default, phase: forward, step: 1, raised_in: lm_head.modules_to_save.default}
# born: modules-to-save
# born_fqn: lm_head.modules_to_save.default
# why: all trainables were lifted to float32, the fully trained output layer too, and nothing casts its input

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(5)
base = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=120,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
).to(torch.bfloat16)
model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"]))
for p in model.parameters():
    if p.requires_grad:
        p.data = p.data.float()

opt = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=2e-4)
for step in range(3):
    ids = torch.randint(0, 120, (2, 20))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    opt.step()
    opt.zero_grad()
    print(f"{step}: {loss.item():.3f}")
