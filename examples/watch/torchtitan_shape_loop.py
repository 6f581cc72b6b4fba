from collections.abc import Iterator

import torch
from torch import Tensor
from toy import STEPS, ids, llama

import rankscope as rs


class Optimizers:
    """Several optimizers that step together, as torchtitan's ``OptimizersContainer``."""

    def __init__(self, parts: list[torch.nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts]

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class Trainer:
    """Model parts, accumulated micro-batches, a clipped gradient and a step, as in torchtitan's ``Trainer``."""

    def __init__(self, accumulation: int) -> None:
        self.model_parts, self.accumulation = [llama()], accumulation
        self.optimizers = Optimizers(self.model_parts)
        self.watch = rs.watch(self.model_parts[0], self.optimizers.optimizers)

    def train_step(self, batches: Iterator[Tensor]) -> None:
        self.optimizers.zero_grad()
        for _ in range(self.accumulation):
            batch = next(batches)
            loss = self.model_parts[0](input_ids=batch, labels=batch).loss / self.accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model_parts[0].parameters(), 1.0)
        self.optimizers.step()


trainer = Trainer(accumulation=2)
batches = iter(ids().split(4))
for _ in range(STEPS):
    trainer.train_step(batches)
model = trainer.model_parts[0]
