"""A classifier of sequences that does not learn: the loss stays at ln 4 = 1.386."""

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h)[0]
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    def __init__(self, width: int = 32, depth: int = 2, classes: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(width) for _ in range(depth)))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        z = self.head(self.blocks(x).mean(1))
        return F.relu(z - 5)


def build():
    torch.manual_seed(0)
    return Classifier()


def batch():
    """64 sequences of 16 tokens. The class is the corner in which their first token lies."""
    x = torch.randn(64, 16, 32, generator=torch.Generator().manual_seed(0))
    return x, 2 * (x[:, 0, 0] > 0).long() + (x[:, 0, 1] > 0).long()


def main(steps: int = 100) -> None:
    model, (x, y) = build(), batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item():.3f} after {steps} steps")


if __name__ == "__main__":
    main()
