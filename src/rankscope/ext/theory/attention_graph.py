"""The graph of an attention matrix: which tokens reach which, and in how many layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from torch import Tensor

from rankscope._citations import Cite

DEFINED_IN = Cite("wu2024role", "sec. 3")


@dataclass(frozen=True)
class AttentionGraph:
    """A graph with an edge from token j to token i if i attends to j.

    Attributes:
        complete: every token sees every token.
        self_loops: every token sees itself.
        strongly_connected: every token reaches every other.
        radius: smallest number of layers in which some token reaches all; None if none does.
        centres: number of tokens that reach all within the radius.
        diameter: smallest number of layers in which every token reaches every other; None if that never happens.
        tokens: number of tokens.
        packed: the edges, row by row, eight per byte, in hexadecimal; :meth:`edges` unpacks them.
    """

    complete: bool
    self_loops: bool
    strongly_connected: bool
    radius: int | None
    centres: int
    diameter: int | None
    tokens: int
    packed: str

    def edges(self) -> NDArray[np.bool_]:
        """A matrix with entry (i, j) True if token i attends to token j."""
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(self.packed), dtype=np.uint8), count=self.tokens**2)
        return bits.reshape(self.tokens, self.tokens).astype(np.bool_)


def attention_graph(edges: Bool[Tensor, "query key"]) -> AttentionGraph:
    """Connectivity of a mask, or of the entries where attention is above zero (**Exact**).

    Example:
        The first token of a causal mask reaches all in one layer, and no other token reaches it.

        >>> attention_graph(torch.ones(4, 4).tril().bool()).radius
        1
        >>> attention_graph(torch.ones(4, 4).tril().bool()).strongly_connected
        False
    """
    return _graph(edges.shape[-1], edges.cpu().numpy().tobytes())


@lru_cache(maxsize=64)
def _graph(n: int, cells: bytes) -> AttentionGraph:
    """Cached, because all layers of a model usually have the same graph."""
    edges = np.frombuffer(cells, dtype=np.bool_).reshape(n, n)
    layers = _layers_to_all(edges)
    radius = float(layers.min())
    strong = bool(np.isfinite(layers).all())
    return AttentionGraph(
        complete=bool(edges.all()),
        self_loops=bool(edges.diagonal().all()),
        strongly_connected=strong,
        radius=int(radius) if math.isfinite(radius) else None,
        centres=int((layers == radius).sum()) if math.isfinite(radius) else 0,
        diameter=int(layers.max()) if strong else None,
        tokens=n,
        packed=np.packbits(edges).tobytes().hex(),
    )


def _layers_to_all(edges: NDArray[np.bool_]) -> NDArray[np.float64]:
    """For each token the layers after which every token holds something of it; inf if that never happens.

    A token keeps what it holds, even if it does not see itself.
    """
    sees = (edges | np.eye(len(edges), dtype=np.bool_)).astype(np.float32)
    held = np.eye(len(edges), dtype=np.bool_)
    layers = np.full(len(edges), np.inf)
    for layer in range(len(edges)):
        layers[held.all(axis=0) & np.isinf(layers)] = layer
        # float32 counts up to 2^24 tokens exactly, and uses BLAS
        wider = sees @ held.astype(np.float32) > 0
        if np.array_equal(wider, held):
            break
        held = wider
    return layers


def least_edge(P: Float[Tensor, "heads query key"]) -> tuple[float, Bool[Tensor, "query key"]]:
    """The smallest attention on an edge, and the edges: entries where some head has nonzero attention.

    An edge on which a head's attention underflowed to zero counts as one with attention 0.
    """
    edges = (P > 0).any(0)
    return float(P.masked_fill(~edges, torch.inf).min()), edges
