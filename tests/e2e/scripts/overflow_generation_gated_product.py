# expect: {id: float16-overflow, family: nonfinite, raises: RuntimeError}
# at: {fqn: model.layers.1.mlp, op: aten.mul.Tensor, phase: generate, step: 1}
# why: sampling from a float16 Gemma; multinomial only consumes what the gated product made

import torch
from transformers import GemmaConfig, GemmaForCausalLM

torch.manual_seed(5)
config = GemmaConfig(
    vocab_size=70,
    hidden_size=24,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=12,
    pad_token_id=0,
    eos_token_id=69,
)
riddler = GemmaForCausalLM(config)
state = riddler.state_dict()
for key in state:
    if "layers.1.mlp" in key and "down" not in key:
        state[key].mul_(8000)
riddler = riddler.to(torch.float16).eval()

prompts = torch.randint(3, 69, (2, 6))
torch.manual_seed(7)
out = riddler.generate(
    input_ids=prompts,
    attention_mask=torch.ones_like(prompts),
    do_sample=True,
    temperature=0.8,
    max_new_tokens=8,
)
print(out.tolist())
