import numpy as np
import torch
from olmo_core.data import NumpyDataLoaderConfig, NumpyFSLDatasetConfig, TokenizerConfig
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train import Duration, TrainerConfig
from olmo_core.train.train_module import TransformerTrainModuleConfig
from toy import STEPS, TOKENS, ids, tokenizer

import rankscope as rs

torch.manual_seed(0)
words = len(tokenizer())
config = TransformerConfig.llama_like(d_model=32, vocab_size=words, n_layers=3, n_heads=2, hidden_size_multiple_of=32)
module = TransformerTrainModuleConfig(
    rank_microbatch_size=8 * TOKENS, max_sequence_length=TOKENS, optim=AdamWConfig(lr=1e-3)
).build(config.build(init_device="cpu"), device=torch.device("cpu"))
model = module.model
ids().numpy().astype(np.uint16).tofile("tokens.npy")
names = TokenizerConfig(words, eos_token_id=2, pad_token_id=0)
data = NumpyFSLDatasetConfig(paths=["tokens.npy"], sequence_length=TOKENS, tokenizer=names, work_dir=".").build()
loader = NumpyDataLoaderConfig(global_batch_size=8 * TOKENS, seed=0).build(
    data, dp_process_group=module.dp_process_group
)
trainer = TrainerConfig(
    save_folder="out", max_duration=Duration.steps(STEPS), device="cpu", no_checkpoints=True, no_evals=True
).build(module, loader)
watch = rs.watch(trainer)
trainer.fit()
