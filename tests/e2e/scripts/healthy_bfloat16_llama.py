# expect: {id: null, family: healthy, raises: null}
# why: bfloat16 Llama; its norms go to float32 and come back, rotary tables stay float32

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(3)
config = LlamaConfig(
    vocab_size=96,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    eos_token_id=95,
    dtype=torch.bfloat16,
)
with tempfile.TemporaryDirectory() as folder:
    LlamaForCausalLM._from_config(config).save_pretrained(folder)
    poet = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()

start = torch.randint(1, 90, (2, 5))
ones = torch.ones_like(start)
torch.manual_seed(0)
sampled = poet.generate(start, attention_mask=ones, max_new_tokens=8, do_sample=True, top_p=0.9)
greedy = poet.generate(start, attention_mask=ones, max_new_tokens=8, do_sample=False)
with torch.no_grad():
    print("nll", poet(input_ids=sampled, labels=sampled).loss.item())
print(sampled[:, 5:].tolist(), greedy[:, 5:].tolist())
