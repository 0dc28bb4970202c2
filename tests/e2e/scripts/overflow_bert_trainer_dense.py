# expect: {id: float16-overflow, family: nonfinite, raises: null}
# at: {fqn: bert.encoder.layer.1.output.dense, op: aten.addmm.default, phase: forward, step: 1}
# why: transformers' Trainer on a float16 BERT; one dense layer's output is beyond 65504

import torch
from textkit import SENTENCES, letters
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

torch.manual_seed(3)
tokenizer = letters()
config = BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
    max_position_embeddings=64,
    num_labels=2,
)
classifier = BertForSequenceClassification(config)
last = classifier.bert.encoder.layer[1]
with torch.no_grad():
    last.intermediate.dense.weight.mul_(40)
    last.output.dense.weight.mul_(6e5)
classifier.half()
encoded = tokenizer(SENTENCES, padding="max_length", max_length=40, truncation=True)
data = [
    {"input_ids": ids, "attention_mask": mask, "labels": number % 2}
    for number, (ids, mask) in enumerate(zip(encoded["input_ids"], encoded["attention_mask"], strict=True))
]
args = TrainingArguments(
    output_dir="out",
    max_steps=3,
    per_device_train_batch_size=4,
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    use_cpu=True,
    seed=3,
)
trainer = Trainer(model=classifier, args=args, train_dataset=data)
trainer.train()
for row in trainer.state.log_history:
    print(row)
