r"""Simulates a design without drawing its weights, with exactly the same distribution. Ours.

At initialisation each matrix W is used once, with iid Gaussian entries. Let the columns of B be an orthonormal basis of
the span of the tokens X. Then :math:`XW = (XB)(B^TW)`, and :math:`B^TW` is itself iid Gaussian, with as many rows as
there are tokens: n x d numbers instead of d x d, with the distribution of the network at full width. Every matrix gets
fresh numbers, so a model whose blocks share weights (ALBERT) is not covered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from rankscope.models.design import Design

Span = Callable[[Tensor], Tensor]
"""Returns an orthonormal basis, ``(dim, rank)``, of the span of the rows of tokens ``(1, tokens, dim)``."""


def span_of_rows(x: Float[Tensor, "one tokens dim"]) -> Float[Tensor, "dim rank"]:
    """An orthonormal basis of the span of the tokens, by QR.

    Example:
        >>> basis = span_of_rows(torch.tensor([[[0.0, 0.0, 2.0], [0.0, 1.0, 2.0]]], dtype=torch.float64))
        >>> basis.shape, round(float(basis[0].abs().sum()), 12)
        (torch.Size([3, 2]), 0.0)
    """
    basis: Tensor = torch.linalg.qr(x[0].T, mode="reduced").Q
    return basis


@dataclass
class Sampler:
    """Runs blocks of a design on one sequence, sampling the effect of each weight matrix.

    Args:
        design: the design to run.
        visible: booleans ``(tokens, tokens)``, True where a query sees a key; None if all see all.
        generator: generator of the random numbers.
        span: returns a basis of the tokens; replace it if tokens are not plain tensors.
    """

    design: Design
    visible: Tensor | None
    generator: torch.Generator
    span: Span = span_of_rows

    def tokens(self, count: int) -> Tensor:
        """First tokens ``(1, tokens, width)``: Gaussian, with the design's mean cosine and scale."""
        rho = self.design.initial_cosine
        own = self._normal(count, self.design.width)
        x = math.sqrt(rho) * self._normal(1, self.design.width) + math.sqrt(1 - rho) * own
        x = (x * self.design.embedding_std).unsqueeze(0)
        return normed(x, self.design) if self.design.embedding_norm and self.design.norm != "none" else x

    def block(self, x: Tensor) -> Tensor:
        """One block."""
        design = self.design
        x = self._branch(x, self._attention, design.attention_skip, design.attention_scale)
        if design.mlp == "none":
            return x
        return self._branch(x, self._mlp, design.mlp_skip, design.mlp_scale)

    def _branch(self, x: Tensor, branch: Callable[[Tensor], Tensor], skip: float, scale: float) -> Tensor:
        design = self.design
        out = branch(normed(x, design) if design.norm_place == "pre" else x)
        out = unit_mean_square(out) if design.branch_norm else out
        out = out if scale == 1 else out * scale
        total = out if skip == 0 else (x if skip == 1 else x * skip) + out
        return normed(total, design) if design.norm_place == "post" else total

    def _attention(self, x: Tensor) -> Tensor:
        design = self.design
        basis = self.span(x)
        inner = x @ basis
        q = self._heads(inner, design.heads, design.query_std)
        k = self._heads(inner, design.kv_heads, design.key_std)
        v = self._heads(inner, design.kv_heads, design.value_std)
        if design.positions == "rope":
            turns = rotation(x.shape[1], design.head_dim)
            q, k = rotated(q, *turns), rotated(k, *turns)
        if design.qk_norm:
            q, k = unit_mean_square(q) * design.qk_norm, unit_mean_square(k)
        groups = design.heads // design.kv_heads
        if groups > 1:
            k, v = (t[:, :, None].expand(-1, -1, groups, -1, -1).reshape(1, design.heads, *t.shape[2:]) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) * design.head_dim**-0.5
        bias = self._bias(x.shape[1])
        if bias is not None:
            scores = scores + bias
        mixed = torch.softmax(scores, dim=-1) @ v
        out = mixed.transpose(1, 2).reshape(1, x.shape[1], design.heads * design.head_dim)
        return self._linear(out, design.width, design.output_std)

    def _mlp(self, x: Tensor) -> Tensor:
        design = self.design
        inner = x @ self.span(x)
        hidden = self._mapped(inner, design.mlp_width, design.mlp_in_std)
        if design.mlp in GATED:
            hidden = ACTIVATIONS[GATED[design.mlp]](hidden) * self._mapped(inner, design.mlp_width, design.mlp_in_std)
        else:
            hidden = ACTIVATIONS[design.mlp](hidden)
        return self._linear(hidden, design.width, design.mlp_out_std)

    def _bias(self, tokens: int) -> Tensor | None:
        bias = None if self.visible is None else torch.where(self.visible, 0.0, -math.inf).double()
        if self.design.positions != "alibi":
            return bias
        slopes = 2.0 ** (-8 * torch.arange(1, self.design.heads + 1, dtype=torch.float64) / self.design.heads)
        place = torch.arange(tokens, dtype=torch.float64)
        distance = -(place[:, None] - place).abs()
        alibi = slopes[:, None, None] * distance
        return alibi if bias is None else alibi + bias

    def _heads(self, inner: Tensor, heads: int, std: float) -> Tensor:
        out = self._mapped(inner, heads * self.design.head_dim, std)
        return out.view(1, inner.shape[1], heads, self.design.head_dim).transpose(1, 2)

    def _linear(self, x: Tensor, columns: int, std: float) -> Tensor:
        return self._mapped(x @ self.span(x), columns, std)

    def _mapped(self, inner: Tensor, columns: int, std: float) -> Tensor:
        return inner @ (std * self._normal(inner.shape[-1], columns))

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=self.generator)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "linear": lambda x: x,
}
GATED = {"swiglu": "silu", "geglu": "gelu"}


def normed(x: Tensor, design: Design) -> Tensor:
    """The design's norm, without gain and bias; the tokens themselves if it has none."""
    if design.norm == "layernorm":
        return F.layer_norm(x, (x.shape[-1],), eps=design.norm_eps)
    if design.norm == "rmsnorm":
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + design.norm_eps)
    return x


def unit_mean_square(x: Tensor) -> Tensor:
    """Tokens divided by their root mean square, without an epsilon."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True))


def rotation(tokens: int, head_dim: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, ``(tokens, head_dim)``."""
    rates = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * rates
    angles = torch.cat([angles, angles], dim=-1)[:, :head_dim]
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Queries or keys rotated by their positions."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cosines + turned * sines
