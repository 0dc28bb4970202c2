# expect: {id: null, family: healthy, raises: null}
# why: float16 generation with beam search and a banned word; -inf scores and masks are transformers' own

import torch
from transformers import GPT2Config, GPT2LMHeadModel

torch.manual_seed(37)
config = GPT2Config(vocab_size=64, n_positions=48, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
shelf = GPT2LMHeadModel(config).half().eval()
shelf.generation_config.pad_token_id = 0
opening = torch.tensor([[0, 0, 5, 9], [4, 8, 15, 16]])
read = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
beams = shelf.generate(
    opening, attention_mask=read, num_beams=3, max_new_tokens=6, bad_words_ids=[[7]], do_sample=False
)
print(beams.tolist())
torch.manual_seed(2)
drawn = shelf.generate(opening, attention_mask=read, do_sample=True, top_k=5, top_p=0.8, max_new_tokens=6)
print(drawn.tolist())
