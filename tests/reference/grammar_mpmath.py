"""The networks of the grammar in as many digits as the answer needs, from the definitions alone.

A residual of 10^-3000 is the difference of numbers of order one, so it takes more than 3000 digits to see it. Each
network runs with twice the digits until the exponents of all blocks stand still; those that move with the digits until
the limit are smaller than it, or zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mpmath as mp
import torch
from torch import Tensor

from tests.reference.grammar import Network
from tests.reference.grammar_torch import rotations

Rows = list[list[Any]]

FIRST_DIGITS = 60
STILL = 1e-12
"""How far, relative to itself or to 1, an exponent may move when the digits are doubled and be called still."""


@dataclass(frozen=True)
class Truth:
    """log10 of the relative residual after each block.

    Attributes:
        exponents: None where the digits did not suffice: the residual is then below ``10^-(digits / 2)``, or zero.
        vanished: blocks after which the stream itself is zero, or below what the digits show.
        digits: with which the last pass ran.
    """

    exponents: tuple[float | None, ...]
    vanished: tuple[bool, ...]
    digits: int

    @property
    def ceiling(self) -> float:
        """What an exponent that is not known lies below."""
        return -self.digits / 2


def truth_of(network: Network, most_digits: int) -> Truth:
    """Run with more and more digits, until two passes agree or ``most_digits`` are reached."""
    digits = FIRST_DIGITS
    before = _exponents(network, digits)
    while True:
        digits *= 2
        now = _exponents(network, digits)
        still = [_is_still(a, b) for a, b in zip(before, now, strict=True)]
        if all(still) or 2 * digits > most_digits:
            known = tuple(float(e) if ok else None for ok, (e, _) in zip(still, now, strict=True))
            return Truth(known, tuple(bool(size < -digits / 2) for _, size in now), digits)
        before = now


def _is_still(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    a, b = before[0], now[0]
    return bool(mp.isfinite(a) and mp.isfinite(b) and abs(a - b) <= STILL * max(1, abs(b)))


def _exponents(network: Network, digits: int) -> list[tuple[Any, Any]]:
    """log10 of the relative residual and of the norm of the stream after each block."""
    with mp.workdps(digits):
        rows = _numbers(network.input)
        found = []
        for weights, visible in zip(network.weights, network.visible, strict=True):
            rows = _block(rows, network, {name: _numbers(w) for name, w in weights.items()}, visible.tolist())
            norm, residual = _norm_of(rows), _norm_of(_centred(rows))
            with mp.workdps(30):
                relative = mp.log10(residual) - mp.log10(norm) if residual and norm else mp.mpf("-inf")
                found.append((relative, mp.log10(norm) if norm else mp.mpf("-inf")))
        return found


def _numbers(values: Tensor) -> Any:
    def exactly(value: Any) -> Any:
        return [exactly(v) for v in value] if isinstance(value, list) else mp.mpf(value)

    return exactly(values.double().tolist())


def _norm_of(rows: Rows) -> Any:
    return mp.sqrt(mp.fsum(x * x for row in rows for x in row))


def _centred(rows: Rows) -> Rows:
    mean = [mp.fsum(column) / len(rows) for column in zip(*rows, strict=True)]
    return [[x - m for x, m in zip(row, mean, strict=True)] for row in rows]


def _linear(rows: Rows, weight: Rows, bias: list[Any] | None) -> Rows:
    shift = bias if bias is not None else [mp.mpf(0)] * len(weight)
    return [[mp.fdot(row, column) + b for column, b in zip(weight, shift, strict=True)] for row in rows]


def _block(rows: Rows, network: Network, w: dict[str, Any], visible: list[list[bool]]) -> Rows:
    rows = _around(rows, network, w, "norm1", lambda x: _attention(x, network, w, visible))
    if network.activation == "none":
        return rows
    return _around(rows, network, w, "norm2", lambda x: _mlp(x, network, w))


def _around(rows: Rows, network: Network, w: dict[str, Any], norm: str, branch: Any) -> Rows:
    out = branch(_normed(rows, network, w, norm) if network.placement == "pre" else rows)
    gain = {"none": 0, "cut": 0, "kept": 1, "gain": mp.mpf(1) / 2}[network.skip]
    if gain:
        out = [[gain * a + b for a, b in zip(p, q, strict=True)] for p, q in zip(rows, out, strict=True)]
    return _normed(out, network, w, norm) if network.placement == "post" else out


def _normed(rows: Rows, network: Network, w: dict[str, Any], name: str) -> Rows:
    if network.norm == "none":
        return rows
    eps = mp.mpf(
        {"layer": 1e-5, "rms": 1e-6, "rms_none": torch.finfo(network.format).eps}[network.norm]
    )  # nn.RMSNorm(eps=None) takes the spacing of the format the model is in
    out = []
    for row in rows:
        mean = mp.fsum(row) / len(row) if network.norm == "layer" else mp.mpf(0)
        own = [x - mean for x in row]
        size = mp.sqrt(mp.fdot(own, own) / len(own) + eps)
        shift = w[f"{name}.bias"] if network.norm == "layer" else [mp.mpf(0)] * len(own)
        out.append([x / size * g + b for x, g, b in zip(own, w[name], shift, strict=True)])
    return out


def _attention(rows: Rows, network: Network, w: dict[str, Any], visible: list[list[bool]]) -> Rows:
    q, k, v = (_linear(rows, w[name], w[f"{name}.bias"]) for name in ("q", "k", "v"))
    size, scale, cap = network.head_width, mp.mpf(network.scale), mp.mpf(network.cap)
    cos, sin = (_numbers(table) for table in rotations(network))
    mixed: Rows = [[] for _ in rows]
    for head in range(network.heads):
        part = slice(head * size, (head + 1) * size)
        queries, keys, values = ([row[part] for row in x] for x in (q, k, v))
        if network.rotary:
            queries, keys = _rotated(queries, cos, sin), _rotated(keys, cos, sin)
        for i, query in enumerate(queries):
            seen = [j for j, sees in enumerate(visible[i]) if sees]
            scores = [mp.fdot(query, keys[j]) * scale for j in seen]
            if cap:
                scores = [cap * mp.tanh(score / cap) for score in scores]
            weights = [mp.exp(score) for score in scores]
            total = mp.fsum(weights) + (mp.exp(w["sink"][head]) if network.sinks else 0)
            mixed[i] += [mp.fdot(weights, [values[j][c] for j in seen]) / total for c in range(size)]
    return _linear(mixed, w["o"], w["o.bias"])


def _rotated(rows: Rows, cos: Rows, sin: Rows) -> Rows:
    half = len(rows[0]) // 2
    turned = [[-x for x in row[half:]] + row[:half] for row in rows]
    return [
        [x * c + y * s for x, y, c, s in zip(row, other, c_row, s_row, strict=True)]
        for row, other, c_row, s_row in zip(rows, turned, cos, sin, strict=True)
    ]


def _mlp(rows: Rows, network: Network, w: dict[str, Any]) -> Rows:
    inner = _linear(rows, w["up"], w["up.bias"])
    if network.activation == "swiglu":
        gates = _linear(rows, w["gate"], None)
        inner = [[_silu(g) * u for g, u in zip(p, q, strict=True)] for p, q in zip(gates, inner, strict=True)]
    else:
        inner = [[_ACTIVATION[network.activation](x) for x in row] for row in inner]
    return _linear(inner, w["down"], w["down.bias"])


def _silu(x: Any) -> Any:
    return x / (1 + mp.exp(-x))


def _gelu_tanh(x: Any) -> Any:
    return x * (1 + mp.tanh(mp.sqrt(2 / mp.pi) * (x + mp.mpf(0.044715) * x**3))) / 2


_ACTIVATION = {
    "relu": lambda x: max(x, mp.mpf(0)),
    "gelu": lambda x: x * mp.erfc(-x / mp.sqrt(2)) / 2,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
}
