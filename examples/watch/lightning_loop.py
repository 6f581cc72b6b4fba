import lightning
import torch
from toy import ids, llama

import rankscope as rs


class Module(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = llama()

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.net(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


model = Module()
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False)
watch = rs.watch(trainer)
trainer.fit(model, torch.utils.data.DataLoader(ids(), batch_size=8))
