# expect: {id: unscale-float16-gradients, family: scaling, raises: ValueError}
# at: {fqn: lm_head.modules_to_save.default, op: null, phase: [optimizer, static], step: 1}
# why: peft keeps its adapters in float32, but the fully trained copy of the output layer stays float16

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(2)
config = LlamaConfig(
    vocab_size=90,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=4,
    tie_word_embeddings=False,
)
model = LlamaForCausalLM(config).to(torch.float16)
model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "o_proj"], modules_to_save=["lm_head"]))
model.print_trainable_parameters()

trainable = [p for p in model.parameters() if p.requires_grad]
opt = torch.optim.AdamW(trainable, lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
for step in range(2):
    ids = torch.randint(0, 90, (2, 18))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = model(input_ids=ids, labels=ids).loss
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    print(step, loss.item())
