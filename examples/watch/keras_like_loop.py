import torch
from torch import Tensor, nn
from toy import ids, llama

import rankscope as rs


class Sequence2Sequence:
    """A class with ``compile`` and ``fit``, as in Keras."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def compile(self, optimizer: torch.optim.Optimizer, loss: nn.Module) -> None:
        self.optimizer, self.loss = optimizer, loss

    def fit(self, x: Tensor, y: Tensor, batch_size: int, epochs: int = 1) -> list[float]:
        self.watch = rs.watch(self.net, self.optimizer)
        losses = []
        for _ in range(epochs):
            for inputs, targets in zip(x.split(batch_size), y.split(batch_size), strict=True):
                losses.append(self.train_step(inputs, targets))
        return losses

    def train_step(self, inputs: Tensor, targets: Tensor) -> float:
        self.optimizer.zero_grad()
        logits = self.net(inputs).logits
        loss = self.loss(logits[:, :-1].flatten(0, 1), targets[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        return loss.item()


model = llama()
trainer = Sequence2Sequence(model)
trainer.compile(torch.optim.AdamW(model.parameters(), lr=1e-3), nn.CrossEntropyLoss())
trainer.fit(ids(), ids(), batch_size=8)
