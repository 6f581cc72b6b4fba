"""Maps of the residual stream with everything that depends on the input frozen: norms and gains, as affine maps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class FrozenNorm:
    r"""A norm with frozen scales: :math:`x \mapsto s_t\, g \odot (x - c\,\bar x) + b`. Exact.

    Attributes:
        centred: whether the mean over channels is taken off (LayerNorm) or not (RMSNorm).
        scale: (batch, tokens, 1), the factor by which the norm multiplied each token.
        gain: (dim,), None for one.
        shift: what it adds, None for zero. Some norms compute in float32 inside a float64 model: their rounding
            error is included here, so that the map reproduces the norm's output to the last digits.
    """

    centred: bool
    scale: Tensor
    gain: Tensor | None
    shift: Tensor | None

    def linear(self, x: Tensor) -> Tensor:
        """The map without its shift, applied to ``... batch tokens dim``."""
        y = (x - x.mean(dim=-1, keepdim=True) if self.centred else x) * self.scale
        return y if self.gain is None else y * self.gain


@dataclass(frozen=True, eq=False)
class Gain:
    """Multiplication by a number, or by one number per channel."""

    factor: float | Tensor
    shift: None = None

    def linear(self, x: Tensor) -> Tensor:
        """The product."""
        return x * self.factor


@dataclass(frozen=True, eq=False)
class Chain:
    """A composition of affine maps; the empty chain is the identity.

    Example:
        >>> Chain((Gain(2.0), Gain(3.0))).linear(torch.ones(1, 1, 2)).tolist()
        [[[6.0, 6.0]]]
    """

    parts: tuple[FrozenNorm | Gain, ...] = ()

    def linear(self, x: Tensor) -> Tensor:
        """The chain without its shifts."""
        for part in self.parts:
            x = part.linear(x)
        return x

    def offset(self) -> Tensor | None:
        """The image of zero, broadcastable to ``batch tokens dim``; None for zero."""
        total: Tensor | None = None
        for part in self.parts:
            total = None if total is None else part.linear(total)
            if part.shift is not None:
                total = part.shift if total is None else total + part.shift
        return total

    def then(self, other: Chain) -> Chain:
        """This chain, then the other."""
        return Chain(self.parts + other.parts)

    @property
    def is_identity(self) -> bool:
        """Whether the chain is empty."""
        return not self.parts


IDENTITY = Chain()


@dataclass(frozen=True, eq=False)
class NormCall:
    """One observed call of a norm module."""

    module: nn.Module
    taken: Tensor
    given: Tensor


def tolerance(dtype: torch.dtype) -> float:
    """Relative error up to which two ways of computing a branch in this dtype count as equal."""
    root = math.sqrt(torch.finfo(dtype).eps)
    return 4.0 * root * math.sqrt(root)


def departure(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference relative to the expected value; 0 if both are zero."""
    difference = float(torch.linalg.vector_norm(found.double() - expected.double()))
    return difference / float(torch.linalg.vector_norm(expected.double())) if difference else 0.0


def frozen_norm(call: NormCall, dtype: torch.dtype) -> Chain | None:
    """The call as a map with frozen scales; None if it is not such a map."""
    x, y = call.taken.double(), call.given.double()
    allowed = max(tolerance(call.given.dtype), tolerance(torch.float32))
    if torch.equal(x, y):
        return IDENTITY
    fits = [
        (float(error), centred, gain, shift, scale)
        for centred in (True, False)
        for gain, shift in _affine_parts(call.module, x.shape[-1])
        for error, scale in [_fit(x, y, centred, gain, shift)]
    ]
    good = [fit for fit in fits if fit[0] <= allowed]
    if not good:
        return None
    own = isinstance(call.module, nn.LayerNorm)
    alike = [fit for fit in good if fit[1] == own] if {fit[1] for fit in good} == {True, False} else good
    _, centred, gain, shift, scale = min(alike, key=lambda fit: fit[0])
    bare = FrozenNorm(centred, scale, gain, None)
    left = y - bare.linear(x)
    plain = shift is None and departure(bare.linear(x), y) <= tolerance(call.given.dtype)
    kept = None if plain else left.to(dtype)
    return Chain((FrozenNorm(centred, scale.to(dtype), None if gain is None else gain.to(dtype), kept),))


def _affine_parts(module: nn.Module, dim: int) -> list[tuple[Tensor | None, Tensor | None]]:
    """Gains and shifts this norm may have: its own, one plus its own (Gemma), or none (surgery)."""
    own = {name: p.detach().double() for name, p in module.named_parameters() if p.shape == (dim,)}
    shift = own.get("bias")
    gains = [own[name] for name in own if name != "bias"]
    parts: list[tuple[Tensor | None, Tensor | None]] = [(gain, shift) for gain in gains]
    parts += [(gain + 1, shift) for gain in gains]
    return [*parts, *([(None, shift)] if shift is not None else []), (None, None)]


def _fit(x: Tensor, y: Tensor, centred: bool, gain: Tensor | None, shift: Tensor | None) -> tuple[float, Tensor]:
    """Least-squares scale of each token, and the remaining relative error."""
    base = x - x.mean(dim=-1, keepdim=True) if centred else x
    base = base if gain is None else base * gain
    bare = y if shift is None else y - shift
    power = base.square().sum(dim=-1, keepdim=True)
    scale = torch.where(power > 0, (base * bare).sum(dim=-1, keepdim=True) / power, 0.0)
    return departure(scale * base, bare), scale


def explain(x: Tensor, y: Tensor, norms: Sequence[NormCall], dtype: torch.dtype, *, exact: bool = True) -> Chain | None:
    """How ``y`` was computed from ``x``: unchanged, scaled, or through observed norms; None if none of these.

    Args:
        x: (batch, tokens, dim).
        y: same shape.
        norms: calls that may be in between.
        dtype: dtype of the map.
        exact: compare to the last bit; False compares to the accuracy of the dtype.
    """
    direct = _equal_or_scaled(x, y, exact)
    if direct is not None:
        return direct
    for number in reversed(range(len(norms))):
        call = norms[number]
        after = _equal_or_scaled(call.given, y, True)
        if after is None:
            continue
        before = explain(x, call.taken, norms[:number], dtype, exact=exact)
        through = None if before is None else frozen_norm(call, dtype)
        if before is not None and through is not None:
            return before.then(through).then(after)
    return None


def _equal_or_scaled(x: Tensor, y: Tensor, exact: bool) -> Chain | None:
    if x.shape != y.shape:
        return None
    if torch.equal(x, y) or (not exact and departure(x, y) <= tolerance(y.dtype)):
        return IDENTITY
    return _scaled(x, y)


def _scaled(x: Tensor, y: Tensor) -> Chain | None:
    """One factor for all, or one per channel; accepted only if at least two tokens agree on it."""
    if x[..., 0].numel() < 2:
        return None
    wide, target = x.double().flatten(0, 1), y.double().flatten(0, 1)
    power = wide.square().sum(dim=0)
    one = float((wide * target).sum() / power.sum()) if float(power.sum()) > 0 else 0.0
    if one and departure(one * wide, target) <= tolerance(y.dtype):
        return Chain((Gain(one),))
    each = torch.where(power > 0, (wide * target).sum(dim=0) / power, 0.0)
    if departure(each * wide, target) <= tolerance(y.dtype):
        return Chain((Gain(each.to(x.dtype)),))
    return None
