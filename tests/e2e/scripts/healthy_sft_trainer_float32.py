# expect: {id: null, family: healthy, raises: null}
# why: TRL's SFTTrainer with gradient checkpointing, evaluation and accumulation in float32

import torch
from datasets import Dataset
from textkit import SENTENCES, letters
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

torch.manual_seed(24)
tokenizer = letters()
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        pad_token_id=0,
    )
)
lines = Dataset.from_dict({"text": SENTENCES})
args = SFTConfig(
    output_dir="out",
    max_steps=3,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    gradient_checkpointing=True,
    eval_strategy="steps",
    eval_steps=2,
    max_length=32,
    logging_steps=1,
    report_to="none",
    save_strategy="no",
    use_cpu=True,
    disable_tqdm=True,
    bf16=False,
)
trainer = SFTTrainer(model=model, args=args, train_dataset=lines, eval_dataset=lines, processing_class=tokenizer)
print("loss", trainer.train().training_loss)
