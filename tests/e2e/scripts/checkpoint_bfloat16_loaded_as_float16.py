# expect: {id: checkpoint-dtype-mismatch, family: compile-load, raises: null}
# at: {fqn: [null, ''], op: null, phase: static}
# shows: 'stored torch\.bfloat16 loaded torch\.float16'
# why: a bfloat16 checkpoint is loaded as float16, whose range is smaller

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(4)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    dtype=torch.bfloat16,
)
LlamaForCausalLM._from_config(config).save_pretrained("published")
stored = next(iter(load_file("published/model.safetensors").values())).dtype
model = AutoModelForCausalLM.from_pretrained("published", dtype=torch.float16).eval()
print("stored", stored, "loaded", model.dtype)
ids = torch.randint(0, 64, (1, 12))
with torch.no_grad():
    for _ in range(3):
        ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], -1)
print(ids.tolist())
