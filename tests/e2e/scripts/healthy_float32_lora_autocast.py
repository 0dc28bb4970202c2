# expect: {id: null, family: healthy, raises: null}
# why: float32 LoRA adapters over a frozen bfloat16 base under bfloat16 autocast, as peft means it

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(4)
config = GPT2Config(vocab_size=128, n_positions=48, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
news = GPT2LMHeadModel(config).to(torch.bfloat16)
news = get_peft_model(news, LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True))
optimizer = torch.optim.AdamW([p for p in news.parameters() if p.requires_grad], lr=1e-3)
for step in range(5):
    ids = torch.randint(0, 128, (4, 24))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = news(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(news.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(step, f"{loss.item():.4f}")
