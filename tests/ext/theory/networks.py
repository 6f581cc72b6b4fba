"""Random attention layers, as plain arrays for the references and as tensors for the library."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rankscope.linalg.attention_weights import HeadTensors, head_tensors


@dataclass(frozen=True)
class Layer:
    heads: list[dict[str, np.ndarray]]
    scale: float

    @property
    def tensors(self) -> HeadTensors:
        stacked = {k: torch.from_numpy(np.stack([head[k] for head in self.heads])) for k in self.heads[0]}
        return head_tensors(**stacked, scale=self.scale)


def random_layer(rng: np.random.Generator, dim: int, heads: int, d_qk: int, d_v: int, bias: float = 0.5) -> Layer:
    made = [
        {
            "W_Q": rng.normal(size=(dim, d_qk)) / dim**0.5,
            "W_K": rng.normal(size=(dim, d_qk)) / dim**0.5,
            "W_V": rng.normal(size=(dim, d_v)) / dim**0.5,
            "W_O": rng.normal(size=(d_v, dim)) / (d_v * heads) ** 0.5,
            "b_Q": bias * rng.normal(size=d_qk),
        }
        for _ in range(heads)
    ]
    return Layer(made, float(d_qk**-0.5))


def random_tokens(rng: np.random.Generator, n: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """A mean token and a residual of norm 1, centred to rounding."""
    R = rng.normal(size=(n, dim))
    R -= R.mean(0)
    return rng.normal(size=dim), R / np.linalg.norm(R)
