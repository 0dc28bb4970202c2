"""Trains with more of the TRL that is installed: on preferences, rewards or a teacher.

    python preferences.py kto|rloo|online_dpo|gkd|orpo|cpo|reward DTYPE [OTHER]

OTHER is the dtype of the reference or teacher, which has the same weights; without it TRL has the reference it makes by itself, and the teacher has the
dtype of the student. Prints the losses.
"""

import sys
from typing import Any

import torch
from datasets import Dataset
from tiny import QUIET, checkpoint, questions, tokenizer, variety
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from trl import KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

name, dtype, other = (*sys.argv[1:], None)[:3]
folder, words = checkpoint(), tokenizer()
words.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
settings = QUIET | {"bf16": False, "learning_rate": 1e-3}


def loaded(dtype: str, kind: Any = AutoModelForCausalLM, **options: Any) -> Any:
    """The checkpoint in a dtype."""
    torch.manual_seed(0)
    return kind.from_pretrained(folder, dtype=getattr(torch, dtype), **options)


model = loaded(dtype) if name != "reward" else loaded(dtype, AutoModelForSequenceClassification, num_labels=1)
reference = loaded(other) if other is not None else None
sums = [(f"{i}+{i}=", str(2 * i) if i % 2 else "no") for i in range(16)]
pairs, judged = (
    questions("prompt", "chosen", "rejected"),
    {"reward_funcs": variety, "train_dataset": questions("prompt")},
)
data: dict[str, Any] = {"train_dataset": pairs}
if name == "kto":
    rows = [{"prompt": asked, "completion": said, "label": said != "no"} for asked, said in sums]
    kind, args = KTOTrainer, KTOConfig(**settings)
    data = {"train_dataset": Dataset.from_list(rows), "ref_model": reference}
elif name == "rloo":
    loading = {"dtype": other} if other is not None else None
    args = RLOOConfig(beta=0.05, num_generations=2, max_completion_length=6, model_init_kwargs=loading, **settings)
    kind, data = RLOOTrainer, judged
elif name == "online_dpo":
    kind, args = OnlineDPOTrainer, OnlineDPOConfig(max_new_tokens=6, **settings)
    data = {**judged, "ref_model": reference}
elif name == "gkd":
    roles = ("user", "assistant")
    rows = [
        {"messages": [{"role": role, "content": text} for role, text in zip(roles, each, strict=True)]} for each in sums
    ]
    kind, args = GKDTrainer, GKDConfig(max_length=64, max_new_tokens=6, **settings)
    data = {"train_dataset": Dataset.from_list(rows), "teacher_model": reference or loaded(dtype)}
elif name == "orpo":
    kind, args = ORPOTrainer, ORPOConfig(max_length=64, **settings)
elif name == "cpo":
    kind, args = CPOTrainer, CPOConfig(max_length=64, **settings)
else:
    kind, args = RewardTrainer, RewardConfig(**settings)
trainer = kind(model=model, args=args, processing_class=words, **data)
trainer.train()
for row in trainer.state.log_history:
    if "loss" in row:
        print("loss", row["loss"])
