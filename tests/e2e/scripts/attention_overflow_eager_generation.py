# expect: {id: attention-score-overflow, family: nonfinite, raises: null}
# at: {fqn: model.layers.0.self_attn, op: aten.bmm.default, phase: generate, step: 1}
# shows: '\[0, 0, 0, 0\]'
# why: eager attention in float16; greedy decoding over NaN logits answers token 0 for ever

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

torch.manual_seed(0)
config = Qwen2Config(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
    attn_implementation="eager",
    pad_token_id=0,
    eos_token_id=95,
)
model = Qwen2ForCausalLM(config)
with torch.no_grad():
    for name in ("q_proj", "k_proj"):
        model.get_submodule(f"model.layers.0.self_attn.{name}").bias.uniform_(-400, 400)
model = model.half().eval()
prompt = torch.randint(1, 90, (1, 7))
answer = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
print("answer", answer[0, 7:].tolist())
