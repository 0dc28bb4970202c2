# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: transformer.h.1, op: aten.add.Tensor, phase: forward, step: 1}
# why: DPO on a float16 GPT-2 whose second block's residual sum leaves the range

import torch
from datasets import Dataset
from textkit import SENTENCES, letters
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from trl import DPOConfig, DPOTrainer

torch.manual_seed(2)
tokenizer = letters()
config = GPT2Config(
    vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2
)
model = GPT2LMHeadModel(config)
with torch.no_grad():
    for block in model.transformer.h:
        block.mlp.c_proj.bias.fill_(40000.0)
model.save_pretrained("policy")
model = AutoModelForCausalLM.from_pretrained("policy", dtype=torch.float16)
pairs = Dataset.from_dict(
    {"prompt": SENTENCES, "chosen": [" yes"] * len(SENTENCES), "rejected": [" no"] * len(SENTENCES)}
)
settings = DPOConfig(
    output_dir="out",
    max_steps=2,
    per_device_train_batch_size=2,
    max_length=48,
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
)
trainer = DPOTrainer(model=model, args=settings, train_dataset=pairs, processing_class=tokenizer)
trainer.train()
print(trainer.state.log_history[0])
