# expect: {id: [operand-dtype-mismatch, head-dtype-mismatch], family: mismatch, raises: RuntimeError}
# at: {fqn: transformer.wte, op: aten.native_layer_norm.default, phase: forward, step: 1,
#   raised_in: transformer.h.0.ln_1}
# born: embedding
# born_fqn: transformer.wte
# why: lifting the tied output layer lifts the input embedding as well; the first bfloat16 layer norm refuses its float32

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(12)
config = GPT2Config(vocab_size=150, n_positions=48, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
scorer = GPT2LMHeadModel(config).to(torch.bfloat16).eval()
scorer.lm_head.float()


@torch.no_grad()
def perplexity(ids):
    logits = scorer(ids).logits.float()
    nll = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return nll.exp().item()


poems = torch.randint(1, 150, (3, 4, 32))
for number, poem in enumerate(poems):
    print(number, f"{perplexity(poem):.1f}")
