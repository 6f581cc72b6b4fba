"""A transformer in arbitrary precision, written token by token from the textbook; slow, and nothing clever in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mpmath as mp

Row = list[Any]
Rows = list[Row]
Weights = Mapping[str, Any]


def numbers(values: Any) -> Any:
    """Floats, nested as they are, taken over exactly."""
    return [numbers(value) for value in values] if isinstance(values, (list, tuple)) else mp.mpf(values)


def linear(rows: Rows, weight: Sequence[Row], bias: Row | None = None) -> Rows:
    """``x W^T + b`` for each row."""
    shift = bias if bias is not None else [mp.mpf(0)] * len(weight)
    return [[mp.fdot(row, column) + b for column, b in zip(weight, shift, strict=True)] for row in rows]


def layer_norm(rows: Rows, gain: Row, shift: Row, eps: float) -> Rows:
    out = []
    for row in rows:
        mean = mp.fsum(row) / len(row)
        centred = [x - mean for x in row]
        scale = mp.sqrt(mp.fdot(centred, centred) / len(row) + mp.mpf(eps))
        out.append([x / scale * g + b for x, g, b in zip(centred, gain, shift, strict=True)])
    return out


def rms_norm(rows: Rows, gain: Row, eps: float) -> Rows:
    out = []
    for row in rows:
        scale = mp.sqrt(mp.fdot(row, row) / len(row) + mp.mpf(eps))
        out.append([x / scale * g for x, g in zip(row, gain, strict=True)])
    return out


def gelu(x: Any) -> Any:
    return x * (1 + mp.erf(x / mp.sqrt(2))) / 2


def sigmoid(x: Any) -> Any:
    return 1 / (1 + mp.exp(-x))


def silu(x: Any) -> Any:
    return x * sigmoid(x)


def attention(rows: Rows, w: Weights, heads: int, allowed: Callable[[int, int], bool]) -> Rows:
    """Multi-head softmax attention with biases; ``allowed(query, key)`` is the mask."""
    query, key, value = (linear(rows, w[f"{name}.weight"], w[f"{name}.bias"]) for name in ("q", "k", "v"))
    width = len(query[0]) // heads
    out: Rows = [[] for _ in rows]
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        for i in range(len(rows)):
            seen = [j for j in range(len(rows)) if allowed(i, j)]
            weights = [mp.exp(mp.fdot(query[i][part], key[j][part]) / mp.sqrt(width)) for j in seen]
            total = mp.fsum(weights)
            columns = range(part.start, part.stop)
            out[i] += [mp.fdot(weights, [value[j][c] for j in seen]) / total for c in columns]
    return linear(out, w["o.weight"], w["o.bias"])


def mlp(rows: Rows, w: Weights, kind: str) -> Rows:
    """GELU with biases, or SwiGLU without."""
    if kind == "gelu":
        hidden = [[gelu(x) for x in row] for row in linear(rows, w["up.weight"], w["up.bias"])]
        return linear(hidden, w["down.weight"], w["down.bias"])
    gate, up = linear(rows, w["gate.weight"]), linear(rows, w["up.weight"])
    gated = [[silu(g) * u for g, u in zip(one, other, strict=True)] for one, other in zip(gate, up, strict=True)]
    return linear(gated, w["down.weight"])


def block(
    rows: Rows, w: Weights, *, heads: int, kind: str, norm: str, gain: float, allowed: Callable[[int, int], bool]
) -> Rows:
    """A pre-norm block whose skips have a gain; ``kind`` is that of the MLP."""

    def normed(x: Rows, name: str) -> Rows:
        if norm == "layer":
            return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], 1e-5)
        return rms_norm(x, w[f"{name}.weight"], 1e-6)

    def added(x: Rows, branch: Rows) -> Rows:
        return [[mp.mpf(gain) * a + b for a, b in zip(p, q, strict=True)] for p, q in zip(x, branch, strict=True)]

    rows = added(rows, attention(normed(rows, "norm1"), w, heads, allowed))
    return added(rows, mlp(normed(rows, "norm2"), w, kind))


def log_residual(rows: Rows) -> Any:
    """Natural logarithm of the Frobenius norm of what departs from the mean row."""
    mean = [mp.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
    return mp.log(mp.sqrt(mp.fsum((x - m) ** 2 for row in rows for x, m in zip(row, mean, strict=True))))
