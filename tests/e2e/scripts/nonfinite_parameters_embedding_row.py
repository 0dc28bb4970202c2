# expect: {id: nonfinite-parameters, family: nonfinite, raises: RuntimeError}
# at: {fqn: embed_tokens, op: null, phase: [static, forward, generate], step: 1}
# why: one row of the embedding is inf; sampling dies much later, in multinomial

import numpy as np
import torch
from transformers import GemmaConfig, GemmaForCausalLM

torch.manual_seed(0)
config = GemmaConfig(
    vocab_size=80,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    pad_token_id=0,
    eos_token_id=79,
)
model = GemmaForCausalLM(config).to(torch.bfloat16).eval()
sums, counts = np.random.default_rng(0).normal(size=(80, 32)), np.ones((80, 1))
counts[17] = 0
with np.errstate(divide="ignore"):
    vectors = torch.from_numpy(sums / counts)
model.get_input_embeddings().weight.data.copy_(vectors)

prompt = torch.tensor([[5, 17, 9, 30]])
text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=True, top_k=20)
print(text.tolist())
