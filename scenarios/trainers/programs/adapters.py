"""Trains LoRA adapters with the TRL that is installed.

    python adapters.py dpo|grpo packed|plain [saved]

``packed`` loads the base in 4 bits and prepares it as peft says; ``plain`` loads it in bfloat16. ``saved`` trains the head in full
beside the adapters. Prints the losses.
"""

import sys

import torch
from peft import LoraConfig, prepare_model_for_kbit_training
from tiny import QUIET, checkpoint, questions, tokenizer, variety
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer

packing = None
if "packed" in sys.argv:
    packing = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
model = AutoModelForCausalLM.from_pretrained(checkpoint(), dtype=torch.bfloat16, quantization_config=packing)
if packing is not None:
    model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
saved = ["lm_head"] if "saved" in sys.argv else None
lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=saved)
if sys.argv[1] == "dpo":
    trainer = DPOTrainer(
        model=model,
        args=DPOConfig(bf16=True, **QUIET),
        train_dataset=questions("prompt", "chosen", "rejected"),
        processing_class=tokenizer(),
        peft_config=lora,
    )
else:
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=variety,
        args=GRPOConfig(bf16=True, num_generations=2, max_completion_length=4, **QUIET),
        train_dataset=questions("prompt"),
        processing_class=tokenizer(),
        peft_config=lora,
    )
trainer.train()
for row in trainer.state.log_history:
    if "loss" in row:
        print("loss", row["loss"])
