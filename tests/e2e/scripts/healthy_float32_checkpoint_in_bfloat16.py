# expect: {id: null, family: healthy, raises: null}
# why: a float32 checkpoint is asked for in bfloat16 and fine-tuned in it, as the script says in so many words

import tempfile

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(8)
config = LlamaConfig(vocab_size=80, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
shelf = tempfile.mkdtemp()
LlamaForCausalLM(config).save_pretrained(shelf)
poet = AutoModelForCausalLM.from_pretrained(shelf, dtype=torch.bfloat16)
for name, parameter in poet.named_parameters():
    parameter.requires_grad = "norm" not in name
optimizer = torch.optim.SGD([p for p in poet.parameters() if p.requires_grad], lr=0.5)
for verse in range(4):
    words = (torch.arange(60).reshape(4, 15) * 7 + verse) % 80
    loss = poet(input_ids=words, labels=words).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(verse, f"{loss.item():.3f}")
