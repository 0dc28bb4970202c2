# expect: {id: adapter-dtype-mismatch, family: mismatch, raises: RuntimeError}
# at: {fqn: lora_A.default, op: aten.mm.default, phase: forward, step: 1, raised_in: h.0.attn.c_attn.lora_A.default}
# born: adapter
# born_fqn: lora_A.default
# why: peft's input cast was switched off, so its float32 adapters meet the bfloat16 hidden states

import torch
from peft import LoraConfig, get_peft_model
from peft.helpers import disable_input_dtype_casting
from transformers import GPT2Config, GPT2ForSequenceClassification

torch.manual_seed(0)
config = GPT2Config(
    vocab_size=200, n_positions=64, n_embd=32, n_layer=2, n_head=4, num_labels=3, pad_token_id=0, resid_pdrop=0.0
)
model = GPT2ForSequenceClassification(config).to(torch.bfloat16)
model = get_peft_model(model, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))
optimizer = torch.optim.AdamW(filter(lambda p: p.requires_grad, model.parameters()), lr=1e-3)

with disable_input_dtype_casting(model):
    for step in range(3):
        ids = torch.randint(1, 200, (4, 16))
        loss = model(input_ids=ids, labels=torch.randint(0, 3, (4,))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(step, loss.item())
