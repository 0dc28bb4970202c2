# expect: {id: null, family: healthy, raises: null}
# why: bfloat16 generation with a static cache, greedy and sampled, left-padded prompts with -inf-like masks

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(30)
config = Qwen2Config(
    vocab_size=90,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    pad_token_id=0,
    eos_token_id=89,
    attn_implementation="eager",
    dtype=torch.bfloat16,
)
chat = Qwen2ForCausalLM._from_config(config).eval()
ids = torch.randint(1, 80, (2, 8))
keep = torch.ones_like(ids)
ids[1, :3] = 0
keep[1, :3] = 0
for sample in (False, True):
    out = chat.generate(
        ids,
        attention_mask=keep,
        max_new_tokens=5,
        do_sample=sample,
        cache_implementation="static",
        disable_compile=True,
    )
    print(out[:, 8:].tolist())
