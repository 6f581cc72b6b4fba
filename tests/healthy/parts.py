"""What the healthy programs are written with: a case, a block, a network of blocks."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, IDS, TOKENS, CLASSES, SEQUENCES = 32, 50, 12, 3, 24


@dataclass
class Case:
    """A model, one batch, its loss, and the optimizer that trains it."""

    model: nn.Module
    inputs: Any
    labels: Any = None
    loss: Callable[..., Tensor] = F.cross_entropy
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = lambda held: torch.optim.AdamW(held, 3e-3)
    steps: int = 40

    def loss_now(self) -> Tensor:
        """The loss of one pass on the batch."""
        given = self.inputs
        output = self.model(**given) if isinstance(given, dict) else self.model(given)
        return self.loss(output) if self.labels is None else self.loss(output, self.labels)

    def made(self, model: nn.Module) -> torch.optim.Optimizer:
        """The optimizer, of what is trained in the model or a copy of it."""
        return self.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])

    def train(self) -> tuple[float, float]:
        """The loss before and after the steps, in evaluation mode."""
        optimizer = self.made(self.model)
        self.model.eval()
        before = self.loss_now().item()
        self.model.train()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss_now()
            loss.backward()
            return loss

        for _ in range(self.steps):
            optimizer.step(closure)
        self.model.eval()
        return before, self.loss_now().item()


def programs(module: dict[str, Any]) -> list[Callable[[], Case]]:
    """The functions of a module that take nothing and return a case."""
    functions = [one for one in module.values() if inspect.isfunction(one) and one.__module__ == module["__name__"]]
    return [one for one in functions if one.__annotations__ == {"return": "Case"}]


def ids(sequences: int = SEQUENCES, tokens: int = TOKENS) -> Tensor:
    """Random token ids."""
    return torch.randint(0, IDS, (sequences, tokens))


def classes(sequences: int = SEQUENCES) -> Tensor:
    """Random classes, to be learned by heart."""
    return torch.randint(0, CLASSES, (sequences,))


class Attention(nn.Module):
    """Softmax attention of four heads, written out; subclasses change one line."""

    def __init__(self, d: int = D, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.weights(self.split(self.q(x)), self.split(self.k(x))) @ self.split(self.v(x))
        return self.o(mixed.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    """The feed-forward part of a block."""

    def __init__(self, d: int = D) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def perceptron(*widths: int, act: type[nn.Module] = nn.GELU) -> nn.Sequential:
    """Linear modules of these widths, with an activation between them."""
    parts: list[nn.Module] = []
    for i in range(len(widths) - 1):
        parts += [nn.Linear(widths[i], widths[i + 1]), act()]
    return nn.Sequential(*parts[:-1])


class Block(nn.Module):
    """A pre-norm block of a mixing module and a feed-forward one."""

    def __init__(self, mix: nn.Module | None = None, mlp: nn.Module | None = None, norm: Any = nn.LayerNorm) -> None:
        super().__init__()
        self.n1, self.mix, self.n2, self.mlp = norm(D), mix or Attention(), norm(D), mlp or Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.n1(x))
        return x + self.mlp(self.n2(x))


class Net(nn.Module):
    """Token ids, three blocks, the mean of the tokens, a class; subclasses change one method."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3, out: int = CLASSES) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(IDS, D), nn.Parameter(0.02 * torch.randn(TOKENS, D))
        self.blocks, self.norm, self.head = (
            nn.ModuleList(block() for _ in range(depth)),
            nn.LayerNorm(D),
            nn.Linear(D, out),
        )

    def tokens(self, given: Tensor) -> Tensor:
        return self.embed(given) + self.positions[: given.shape[1]]

    def states(self, given: Tensor) -> Tensor:
        x = self.tokens(given)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, given: Tensor) -> Any:
        return self.head(self.states(given).mean(1))


class Language(Net):
    """A logit of every id at every token."""

    def __init__(self, block: Callable[[], nn.Module] = Block, depth: int = 3) -> None:
        super().__init__(block, depth, IDS)

    def forward(self, given: Tensor) -> Any:
        return self.head(self.states(given))


class Causal(Attention):
    """Each token attends to itself and those before it."""

    def weights(self, q: Tensor, k: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        return scores.masked_fill(later, float("-inf")).softmax(-1)


def causal_block() -> Block:
    return Block(Causal())


def next_id(logits: Tensor, given: Tensor) -> Tensor:
    """Cross-entropy of each next id."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), given[:, 1:].flatten())


def per_token(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross-entropy of the id at each token."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def counting() -> Tensor:
    """Sequences in which each id follows from the one before."""
    return (torch.randint(0, IDS, (SEQUENCES, 1)) + 3 * torch.arange(TOKENS)) % IDS
