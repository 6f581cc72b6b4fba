"""The graph of an attention matrix: which tokens reach which."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Bool, Float
from numpy.typing import NDArray
from scipy.sparse import csr_array
from torch import Tensor

from rankscope._citations import Cite
from rankscope.ext.theory.graphs.connectivity import connectivity

DEFINED_IN = Cite("wu2024role", "sec. 3")


@dataclass(frozen=True)
class AttentionGraph:
    """A graph with an edge from token j to token i if i attends to j.

    Attributes:
        complete: every token sees every token.
        self_loops: every token sees itself.
        strongly_connected: every token reaches every other.
        has_centre: some token reaches every other.
        tokens: number of tokens.
        packed: the edges, row by row, eight per byte, in hexadecimal; :meth:`edges` unpacks them.
    """

    complete: bool
    self_loops: bool
    strongly_connected: bool
    has_centre: bool
    tokens: int
    packed: str

    def edges(self) -> NDArray[np.bool_]:
        """A matrix with entry (i, j) True if token i attends to token j."""
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(self.packed), dtype=np.uint8), count=self.tokens**2)
        return bits.reshape(self.tokens, self.tokens).astype(np.bool_)


def attention_graph(edges: Bool[Tensor, "query key"]) -> AttentionGraph:
    """Connectivity of a mask, or of the entries where attention is above zero (**Exact**).

    Example:
        The first token of a causal mask reaches all, and no other token reaches it.

        >>> graph = attention_graph(torch.ones(4, 4).tril().bool())
        >>> graph.has_centre, graph.strongly_connected
        (True, False)
    """
    return _graph(edges.shape[-1], edges.cpu().numpy().tobytes())


@lru_cache(maxsize=64)
def _graph(n: int, cells: bytes) -> AttentionGraph:
    """Cached, because all layers of a model usually have the same graph."""
    edges = np.frombuffer(cells, dtype=np.bool_).reshape(n, n)
    how = connectivity(csr_array(edges))
    return AttentionGraph(
        complete=bool(edges.all()),
        self_loops=bool(edges.diagonal().all()),
        strongly_connected=how.is_strong,
        has_centre=how.is_quasi_strong,
        tokens=n,
        packed=np.packbits(edges).tobytes().hex(),
    )


def least_edge(P: Float[Tensor, "heads query key"]) -> tuple[float, Bool[Tensor, "query key"]]:
    """The smallest attention on an edge, and the edges: entries where some head has nonzero attention.

    An edge on which a head's attention underflowed to zero counts as one with attention 0.
    """
    edges = (P > 0).any(0)
    return float(P.masked_fill(~edges, torch.inf).min()), edges
