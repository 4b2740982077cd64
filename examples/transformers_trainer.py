"""A tiny GPT-2, not trained before, on rows of random tokens with FusedTrainer."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from fastaccum.bridges.transformers import FusedTrainer

model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_positions=12, n_embd=16, n_layer=2, n_head=2))
model.loss_type = "ForCausalLM"  # it shifts its labels: so the Trainer counts the tokens that are predicted
rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (20, 12))]
args = TrainingArguments(
    "out", gradient_accumulation_steps=4, max_grad_norm=1.0, per_device_train_batch_size=2,
    num_train_epochs=1, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
)  # fmt: skip
trainer = FusedTrainer(model=model, args=args, train_dataset=rows)
trainer.train()
print(f"norm of the last window {trainer.accumulator.norm:.3f}")
