# expect: {id: float16-overflow, family: nonfinite, raises: RuntimeError}
# at: {fqn: model.layers.0.mlp, op: aten.mul.Tensor, phase: [forward, generate], step: 1}
# why: TRL's GRPO samples from a float16 policy; its first product overflow surfaces in multinomial

import torch
from datasets import Dataset
from textkit import SENTENCES, letters
from transformers import LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer


def brief(completions, **kwargs):
    return [-len(text) / 10 for text in completions]


torch.manual_seed(1)
tokenizer = letters()
config = LlamaConfig(
    vocab_size=len(tokenizer),
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    pad_token_id=0,
    eos_token_id=2,
)
policy = LlamaForCausalLM(config)
policy.model.layers[0].mlp.gate_proj.weight.data.mul_(2500)
policy.model.layers[0].mlp.up_proj.weight.data.mul_(2500)
policy.half()
settings = GRPOConfig(
    output_dir="out",
    max_steps=2,
    per_device_train_batch_size=2,
    num_generations=2,
    max_completion_length=6,
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    use_cpu=True,
    bf16=False,
    gradient_checkpointing=False,
)
questions = Dataset.from_dict({"prompt": SENTENCES})
trainer = GRPOTrainer(policy, reward_funcs=brief, args=settings, train_dataset=questions, processing_class=tokenizer)
trainer.train()
print(trainer.state.log_history)
