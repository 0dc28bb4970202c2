"""Trains with the TRL that is installed against a reference model that may compute in another dtype than the policy.

    python reference.py dpo|grpo POLICY REFERENCE [precomputed] [autocast]

POLICY and REFERENCE are dtypes; ``none`` for REFERENCE leaves the reference to TRL, which loads it in the policy's dtype. The policy is called before the
reference in DPO, after it in GRPO and where DPO has the reference's log-probabilities precomputed. Prints the losses.
"""

import sys

import torch
from tiny import QUIET, checkpoint, questions, tokenizer, variety
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

trainer_name, policy, reference, *words = sys.argv[1:]
folder = checkpoint()
model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, policy))
settings = QUIET | {"bf16": "autocast" in words, "learning_rate": 1e-3}
if trainer_name == "dpo":
    other = None
    if reference != "none":
        other = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, reference))
    trainer = DPOTrainer(
        model=model,
        ref_model=other,
        args=DPOConfig(precompute_ref_log_probs="precomputed" in words, **settings),
        train_dataset=questions("prompt", "chosen", "rejected"),
        processing_class=tokenizer(),
    )
else:
    loading = None if reference == "none" else {"dtype": reference}
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=variety,
        args=GRPOConfig(beta=0.04, model_init_kwargs=loading, num_generations=2, max_completion_length=6, **settings),
        train_dataset=questions("prompt"),
        processing_class=tokenizer(),
    )
trainer.train()
for row in trainer.state.log_history:
    if "loss" in row:
        print("loss", row["loss"])
