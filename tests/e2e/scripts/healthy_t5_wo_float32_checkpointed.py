# expect: {id: null, family: healthy, raises: null}
# why: T5 keeps `wo` in float32 by design and casts for it; with gradient checkpointing under bfloat16 autocast

import torch
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(28)
config = T5Config(
    vocab_size=80,
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    dropout_rate=0.0,
    decoder_start_token_id=0,
)
T5ForConditionalGeneration(config).save_pretrained("small")
model = T5ForConditionalGeneration.from_pretrained("small", dtype=torch.float32)
model.gradient_checkpointing_enable()
model.config.use_cache = False
model.train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(3):
    source, target = torch.randint(1, 80, (2, 12)), torch.randint(1, 80, (2, 8))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(input_ids=source, labels=target).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
