import sentence_transformers as st
from datasets import Dataset
from sentence_transformers.losses import MultipleNegativesRankingLoss
from toy import STEPS, bert, sentences, tokenizer

import rankscope as rs

bert().save_pretrained("bert")
tokenizer().save_pretrained("bert")
model = st.SentenceTransformer("bert", device="cpu")
settings = st.SentenceTransformerTrainingArguments(
    "out", max_steps=STEPS, report_to="none", use_cpu=True, save_strategy="no"
)
texts = sentences(97)
data = Dataset.from_dict({"anchor": texts[:-1], "positive": texts[1:]})
loss = MultipleNegativesRankingLoss(model)
trainer = st.SentenceTransformerTrainer(model, settings, train_dataset=data, loss=loss)
watch = rs.watch(trainer)
trainer.train()
