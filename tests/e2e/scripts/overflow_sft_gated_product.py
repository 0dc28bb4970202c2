# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: model.layers.1.mlp, op: aten.mul.Tensor, phase: forward, step: 1}
# why: TRL's SFTTrainer over a float16 model whose second gated product leaves the range

import torch
from datasets import Dataset
from textkit import SENTENCES, letters
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

torch.manual_seed(0)
tokenizer = letters()
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
    )
)
with torch.no_grad():
    for part in ("gate_proj", "up_proj"):
        model.get_submodule(f"model.layers.1.mlp.{part}").weight.mul_(3000)
model = model.to(torch.float16)
trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir="out",
        max_steps=2,
        per_device_train_batch_size=2,
        max_length=32,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        seed=0,
    ),
    train_dataset=Dataset.from_dict({"text": SENTENCES}),
    processing_class=tokenizer,
)
result = trainer.train()
print("steps", result.global_step, "loss", result.training_loss)
