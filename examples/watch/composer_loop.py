from typing import Any

import torch
from composer import ComposerModel, Trainer
from toy import ids, llama

import rankscope as rs


class Wrapped(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = llama()

    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        return self.net(**batch)

    def loss(self, outputs: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return outputs.loss


model = Wrapped()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = torch.utils.data.DataLoader([{"input_ids": row, "labels": row} for row in ids()], batch_size=8)
trainer = Trainer(
    model=model, train_dataloader=loader, max_duration="1ep", optimizers=optimizer, device="cpu", progress_bar=False
)
watch = rs.watch(trainer)
trainer.fit()
