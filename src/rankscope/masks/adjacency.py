"""Any graph, from a file or written out."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from rankscope.errors import InputError
from rankscope.masks._edges import EdgeRows, Progressions
from rankscope.masks._graph_file import graph_from_matrix, read_graph
from rankscope.masks._spec import Parameter, Value, mask

WRITTEN_OUT = 128
"""Maximum number of tokens of a graph that is written out in an expression."""


@lru_cache(maxsize=8)
def _graph(source: str, digest: str) -> EdgeRows:
    if _is_written_out(source):
        lines = source.split("/")
        if len(lines) > WRITTEN_OUT or any(len(line) != len(lines) for line in lines):
            raise InputError(
                f"adjacency: {source[:40]!r} is not a square of 0 and 1 of at most {WRITTEN_OUT} rows: it "
                f"has {len(lines)} rows, the first of {len(lines[0])} digits."
            )
        return graph_from_matrix(np.array([list(map(int, line)) for line in lines]))
    rows, edges = read_graph(source)
    if digest and digest != edges:
        raise InputError(
            f"adjacency: {source!r} is not the file it was: its digest is {edges}, and {digest} was expected. "
            "Leave the digest out to take the file as it is now."
        )
    return rows


def tokens_of(source: str) -> int:
    """Number of tokens of the graph in a file, or written out.

    Example:
        >>> tokens_of("10/11")
        2
    """
    return len(_graph(source, "").indptr) - 1


def _is_written_out(source: str) -> bool:
    return bool(source) and set(source) <= set("01/")


def _settle(parameters: dict[str, Value]) -> dict[str, Value]:
    source, digest = str(parameters["source"]), str(parameters["digest"])
    if _is_written_out(source):
        _graph(source, "")
        return {"source": source, "digest": ""}
    return {"source": source, "digest": digest or read_graph(source)[1]}


def _edges(tokens: int, source: str, digest: str) -> EdgeRows:
    rows = _graph(source, digest)
    if len(rows.indptr) - 1 != tokens:
        raise InputError(
            f"adjacency: the graph {source[:40]!r} has {len(rows.indptr) - 1} tokens, and a mask over {tokens} keys "
            "is needed. Give inputs of that length, or a graph of this one."
        )
    return rows


@mask(
    parameters=(
        Parameter("source", "path of a .npy or .npz file, or rows such as '10/11'", str),
        Parameter("digest", "start of the file's SHA-256; filled in, checked on reading", str, default=""),
    ),
    edges=_edges,
    example='adjacency("0001/1100/0110/0011")',
    is_causal=False,
    self_loops=False,
    pointwise=False,
    settle=_settle,
)
def adjacency(query: Tensor, key: Tensor, source: str, digest: str) -> Tensor:
    """Edges from a graph: query i sees key j if entry (i, j) of its matrix is not zero.

    The graph has as many tokens as there are keys. Its file is data: no pickle is loaded, and sizes are limited.

    Example:
        >>> import torch
        >>> adjacency(torch.arange(2).unsqueeze(1), torch.arange(2).unsqueeze(0), source="10/11", digest="").tolist()
        [[True, False], [True, True]]
    """
    rows = _edges(key.shape[-1], source, digest)
    position = query.reshape(-1).cpu().numpy()
    start = rows.indptr[np.maximum(position, 0)]
    stop = np.where(position < 0, start, rows.indptr[np.maximum(position, 0) + 1])
    picked = Progressions(start, stop).rows()
    out = np.zeros((len(position), key.shape[-1]), dtype=np.bool_)
    out[picked.queries, rows.indices[picked.indices]] = True
    return torch.from_numpy(out).to(key.device)
