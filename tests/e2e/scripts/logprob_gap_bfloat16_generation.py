# expect: {id: logprob-gap, family: silent, raises: null}
# at: {phase: [forward, generate]}
# shows: 'largest gap 0\.[0-9]*[1-9]'
# why: a bfloat16 model generates, a float32 model with the same weights is trained on its log-probabilities

import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(3)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
    initializer_range=0.25,
    pad_token_id=0,
    eos_token_id=63,
)
learner = LlamaForCausalLM(config)
player = LlamaForCausalLM(config).to(torch.bfloat16).eval()
optimizer = torch.optim.SGD(learner.parameters(), lr=1e-3)
for turn in range(2):
    player.load_state_dict(learner.state_dict())
    question = torch.randint(1, 60, (4, 6))
    played = player.generate(
        question, attention_mask=torch.ones_like(question), max_new_tokens=8, min_new_tokens=8, do_sample=True
    )
    said = played[:, 6:].unsqueeze(-1)
    with torch.no_grad():
        then = player(input_ids=played).logits[:, 5:-1].float().log_softmax(-1).gather(-1, said)
    now = learner(input_ids=played).logits[:, 5:-1].log_softmax(-1).gather(-1, said)
    ratio = (now - then).exp()
    prize = (said == 7).float() - 0.1
    loss = -(ratio.clamp(0.8, 1.2) * prize).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(turn, f"loss {loss.item():.4f} largest gap {(now - then).abs().max().item():.4f}")
