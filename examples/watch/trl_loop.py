from datasets import Dataset
from toy import STEPS, TOKENS, llama, sentences, tokenizer
from trl import SFTConfig, SFTTrainer

import rankscope as rs

model = llama()
settings = SFTConfig(
    "out", max_steps=STEPS, report_to="none", use_cpu=True, bf16=False, save_strategy="no", max_length=TOKENS
)
data = Dataset.from_list([{"text": text} for text in sentences(64)])
trainer = SFTTrainer(model, settings, train_dataset=data, processing_class=tokenizer())
watch = rs.watch(trainer)
trainer.train()
