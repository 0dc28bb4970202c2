# expect: {id: rounded-rotary-buffer, family: silent, raises: null}
# at: {fqn: model.rotary_emb, op: null, phase: static}
# shows: 'kept torch\.bfloat16'
# why: to(bfloat16) on a transformers model casts inv_freq too, which from_pretrained(dtype=...) would not

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(1)
config = LlamaConfig(
    vocab_size=80,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=1024,
)
model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
print("frequencies kept", model.model.rotary_emb.inv_freq.dtype)
text = torch.randint(0, 80, (1, 700))
with torch.no_grad():
    nll = model(input_ids=text, labels=text).loss
print("per token", nll.item())
