# expect: {id: update-stall, family: silent, raises: null}
# at: {fqn: [model.norm, model.layers.0.input_layernorm, model.layers.0.post_attention_layernorm], op: null,
#   phase: optimizer, step: 1}
# shows: 'norm change 0\.0 '
# why: a bfloat16 model under AdamW at a usual fine-tuning rate; the norm weights, which are one, never move

import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

torch.manual_seed(4)
config = LlamaConfig(
    vocab_size=90,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_labels=3,
    pad_token_id=0,
)
grader = LlamaForSequenceClassification(config).to(torch.bfloat16)
optimizer = torch.optim.AdamW(grader.parameters(), lr=2e-5, weight_decay=0.0)
before = {name: p.detach().clone() for name, p in grader.named_parameters()}
for step in range(6):
    essays, grades = torch.randint(1, 90, (4, 20)), torch.randint(0, 3, (4,))
    loss = grader(input_ids=essays, labels=grades).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(grader.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    moved = {name: (p - before[name]).abs().max().item() for name, p in grader.named_parameters()}
    norms = max(size for name, size in moved.items() if "norm" in name)
    print(f"{step} loss {loss.item():.3f} norm change {norms} other {max(moved.values()):.1e}")
