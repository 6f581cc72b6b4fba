from toy import STEPS, ids, llama
from transformers import Trainer, TrainingArguments

import rankscope as rs

model = llama()
settings = TrainingArguments("out", max_steps=STEPS, report_to="none", use_cpu=True, save_strategy="no")
data = [{"input_ids": row, "labels": row} for row in ids()]
trainer = Trainer(model, settings, train_dataset=data)
watch = rs.watch(trainer)
trainer.train()
