r"""Ranks of large token matrices from products with a few vectors, each with an interval.

A full spectrum costs :math:`O(\min(n, d)^3)`, at width 4096 as much as the block that is measured. The ranks are sums
of functions of the eigenvalues :math:`\lambda_i` of :math:`A = W^TW`, W = CX, and such sums need no eigenvalue. The
steps, all in the units of :math:`\|W\|_F^2`:

1. Golub-Kahan bidiagonalisation of W from several start vectors at once. For a start vector z it gives coefficients
   :math:`s_1, s_2, \dots` (the squared entries of the bidiagonal matrix) of the continued fraction

   .. math:: z^T A (A + t)^{-1} z = \frac{R}{t + R}, \quad
             R(t) = \cfrac{s_1}{1 + \cfrac{s_2}{t + \cfrac{s_3}{1 + \cdots}}}

   Cut after an odd term it is an upper bound (the Gauss rule), after an even one a lower bound (the Gauss-Radau rule
   with a node at zero). No term is subtracted anywhere, and in float32 singular values keep an absolute error of
   :math:`\varepsilon s_1`, not :math:`\sqrt{\varepsilon} s_1` as with products with A.
2. The trace over all directions: a basis Q of the strongest ones, found by subspace iteration, is summed exactly, the
   rest is estimated from random vectors orthogonal to Q. The known trace of A is used as a control variate. Student's t
   over the random vectors gives the interval.
3. Powers of eigenvalues from their resolvents,
   :math:`\sqrt\lambda = \frac1\pi \int_0^\infty \frac{\lambda}{\lambda + t} \frac{dt}{\sqrt t}` and its derivative by
   the exponent, :math:`\sqrt\lambda \log\lambda`, whose integrand has a further factor :math:`\log t`. In
   :math:`\log t` the trapezoidal rule with step 1 is exact to nine digits.
4. X itself differs from W by the mean m only, :math:`X^TX = A + n\,mm^T`, so
   :math:`\log\det(X^TX + t) = \log\det(A + t) + \log(1 + g)`, :math:`g = n\,m^T(A + t)^{-1}m`. One more start
   vector, m, gives g, without a random error: the spectrum of X costs one column.

Nothing here depends on values: there is no branch and no copy to the host, and matrices of a stack are done together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

DEFLATED, PROBES, POWERS, STEPS, BASIS_STEPS = 16, 15, 2, 16, 5
LEAST_SIDE = 4 * (DEFLATED + PROBES)
"""Smallest side for which there is an estimate."""

# Two-sided 99.9% of Student's t with PROBES - 2 degrees of freedom: one is taken by the control variate.
_STUDENT = 4.221
# The same confidence for the largest eigenvalue: minus half of the 99.9% point of chi-squared with 2 * PROBES degrees
# of freedom, which is the distribution of the sum of the logs of PROBES probabilities (Fisher's method).
_UNSEEN = -29.85
# log t of the trapezoidal rule. The lower end is below the square of what float32 resolves; the upper end is above the
# energy of the mean of tokens that agree to 16 digits.
_LOG_T = (-42.0, 81.0, 0.5)
# Not 0 or another number that people choose: with the seed of the tokens, the random vectors would be tokens.
_SEED = 8_146_902_713_559
_EXCESS = torch.logspace(-6, 0, 25, dtype=torch.float64)


class Estimate(NamedTuple):
    """A value per matrix, and the interval that contains the exact one."""

    value: Float[Tensor, " matrices"]
    low: Float[Tensor, " matrices"]
    high: Float[Tensor, " matrices"]


@dataclass(frozen=True)
class RankEstimates:
    """Ranks of a stack of matrices."""

    stable_rank: Estimate
    effective_rank: Estimate
    participation_ratio: Estimate
    energy_rank_99: Estimate

    def where(self, condition: Tensor) -> RankEstimates:
        """NaN for matrices for which the condition does not hold."""
        parts = (getattr(self, part.name) for part in fields(self))
        return RankEstimates(*(Estimate(*(end.where(condition, math.nan) for end in part)) for part in parts))


class PlainAndCentred(NamedTuple):
    """Ranks of X and of CX."""

    plain: RankEstimates
    centred: RankEstimates

    def where(self, plain: Tensor, centred: Tensor) -> PlainAndCentred:
        """NaN for matrices for which a condition does not hold."""
        return PlainAndCentred(self.plain.where(plain), self.centred.where(centred))


class Chains(NamedTuple):
    """Squared coefficients of bidiagonalisations, in units of the energy of W.

    ``basis`` and ``probes`` start on the smaller side, ``mean`` at the unit vector along the mean; one row per
    coefficient, then the matrices, then the start vectors.
    """

    basis: Float[Tensor, "coefficients matrices deflated"]
    probes: Float[Tensor, "coefficients matrices probes"]
    mean: Float[Tensor, "coefficients matrices 1"]
    side: int


def bidiagonalised(
    W: Float[Tensor, "matrices tokens dim"], mean: Float[Tensor, "matrices dim"], energy: Float[Tensor, " matrices"]
) -> Chains:
    """Coefficients of all start vectors of a stack of centred matrices.

    Args:
        W: the matrices, scaled so that ``energy``, the sum of their squares, neither overflows nor underflows.
        mean: unit vectors.
        energy: in float64.
    """
    # Vectors are rows: a few rows times W and times its transpose are both fast products. ``out`` leads from the
    # smaller side to the larger one.
    by_tokens = W.shape[1] <= W.shape[2]
    out = W if by_tokens else W.mT
    side = out.shape[1]
    generator = torch.Generator().manual_seed(_SEED)

    def draw(vectors: int) -> Tensor:
        return torch.randn(vectors, side, generator=generator).to(W).expand(len(W), -1, -1)

    Q = draw(DEFLATED)
    for _ in range(POWERS):
        Q = torch.linalg.qr((Q @ out @ out.mT).mT).Q.mT
    Z = draw(PROBES)
    for _ in range(2):  # once leaves float32 rounding of the strongest directions, which would count them twice
        Z = Z - (Z @ Q.mT) @ Q
    small, _ = _unit(Z)
    mean = mean.unsqueeze(1)
    if by_tokens:
        # The mean is on the larger side: it starts there, one coefficient later. Zero stands for what comes before.
        small = torch.cat([small, torch.zeros_like(small[:, :1]), Q], 1)
        large, c = _unit(small @ out)
        large[:, PROBES : PROBES + 1] = mean
    else:
        small = torch.cat([small, mean, Q], 1)
        large, c = _unit(small @ out)
    found = [c]
    for step in range(1, 2 * STEPS):
        if step == 2 * BASIS_STEPS:
            small, large, c = (part[:, : PROBES + 1] for part in (small, large, c))
        if step % 2:
            small, c = _unit(torch.baddbmm(-c.unsqueeze(-1) * small, large, out.mT))
        else:
            large, c = _unit(torch.baddbmm(-c.unsqueeze(-1) * large, small, out))
        found.append(c)
    squares = [(c.double() / energy.sqrt().unsqueeze(-1)).square() for c in found]
    return Chains(
        basis=torch.stack([square[:, PROBES + 1 :] for square in squares[: 2 * BASIS_STEPS]]),
        probes=torch.stack([square[:, :PROBES] for square in squares]),
        mean=torch.stack([square[:, PROBES : PROBES + 1] for square in squares[int(by_tokens) :]]),
        side=side,
    )


def joined(parts: Sequence[Chains]) -> Chains:
    """The chains of several stacks as those of one."""
    basis, probes, mean = (torch.cat(column, 1) for column in zip(*(part[:3] for part in parts), strict=True))
    return Chains(basis, probes, mean, parts[0].side)


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors and lengths; a vector of length zero, where a chain ends, stays zero."""
    length = torch.linalg.vector_norm(x, dim=-1)
    return x / length.clamp_min(torch.finfo(x.dtype).tiny).unsqueeze(-1), length


class Bounds(NamedTuple):
    """A lower and an upper bound."""

    low: Tensor
    high: Tensor

    def __add__(self, other: Bounds) -> Bounds:  # type: ignore[override]
        return Bounds(self.low + other.low, self.high + other.high)


def remainder_bounds(squares: Tensor, t: Tensor) -> Bounds:
    """R(t) of the continued fraction, cut after an even and after an odd number of terms."""
    count = len(squares)
    return Bounds(_remainder(squares[: count // 2 * 2], t), _remainder(squares[: (count - 1) // 2 * 2 + 1], t))


def _remainder(squares: Tensor, t: Tensor) -> Tensor:
    R = torch.zeros_like(t * squares[0])
    for i in reversed(range(len(squares))):
        R = squares[i] / (R + (t if i % 2 else 1.0))
    return R


def ranks(chains: Chains, mean_energy: Float[Tensor, " matrices"], eps: float) -> PlainAndCentred:
    r"""Ranks of X and of W, from the coefficients of W.

    Args:
        chains: the coefficients.
        mean_energy: :math:`n\|m\|^2`, in units of the energy of W.
        eps: rounding unit of the format in which they were computed.
    """
    trace = _Trace(chains)
    roots = _roots(chains, trace)
    square = _square(chains, trace)
    slack = _SLACK * eps + _SECTIONS**-_ROUNDS
    top = _largest(chains, square, slack)
    # Rounding changes W by a matrix of norm eps |W|, and the sum of its singular values by sqrt(side) times that.
    smear = 4.0 * eps * math.sqrt(chains.side)
    G, none = mean_energy, torch.zeros_like(mean_energy)
    nothing = Bounds(none, none)
    centred = RankEstimates(
        stable_rank=Estimate(1.0 / top.low, (1.0 / top.high).clamp_min(1.0), 1.0 / top.low * (1.0 + slack)),
        effective_rank=roots.rank(nothing, nothing, smear),
        participation_ratio=_inverse(square, 1.0, slack),
        energy_rank_99=_count_to_99(chains, trace, none, slack),
    )
    largest = _largest_with_mean(chains.mean, top, G, slack)
    whole = 1.0 + G
    mean_square = G * (G + 2.0 * chains.mean[0, :, 0])
    plain = RankEstimates(
        stable_rank=Estimate(
            whole / largest.low, (whole / largest.high).clamp_min(1.0), whole / largest.low * (1.0 + slack)
        ),
        effective_rank=roots.rank(*_roots_of_mean(chains.mean, G), smear),
        participation_ratio=_inverse(Estimate(*(part + mean_square for part in square)), whole, slack),
        energy_rank_99=_count_to_99(chains, trace, G, slack),
    )
    return PlainAndCentred(plain, centred)


# Products of float32 vectors of this length were off by up to 20 roundings in the cases of ``scripts/thin_spectra.py``.
_SLACK = 64.0


def _inverse(square: Estimate, whole: Tensor | float, slack: float) -> Estimate:
    """Participation ratio from the sum of squared eigenvalues."""
    total = whole * whole if isinstance(whole, Tensor) else torch.full_like(square.value, whole * whole)
    value = total / square.value
    return Estimate(value, (total / square.high * (1.0 - slack)).clamp_min(1.0), total / square.low * (1.0 + slack))


class _Trace:
    """Sums over all directions: exact over the basis, estimated over the rest, with the energy as control variate."""

    def __init__(self, chains: Chains) -> None:
        self._rest = chains.side - DEFLATED
        x = chains.probes[0]
        known = (1.0 - chains.basis[0].sum(-1, keepdim=True)).clamp_min(0.0) / self._rest
        self._x = x - x.mean(-1, keepdim=True)
        self._spread = self._x.square().sum(-1, keepdim=True)
        self._move = known - x.mean(-1, keepdim=True)
        self._leverage = (1.0 + PROBES * self._move.square() / self._spread).nan_to_num(nan=1.0).sqrt()

    def __call__(self, of_basis: Tensor, of_probes: Tensor) -> Tensor:
        slope = self._slope(of_probes)
        return of_basis.sum(-1) + self._rest * (of_probes.mean(-1) + (slope * self._move).squeeze(-1))

    def bounds(self, shares: _Shares) -> Bounds:
        """Both bounds, without the error of the random vectors."""
        return Bounds(*(self(basis, probes) for basis, probes in zip(shares.basis, shares.probes, strict=True)))

    def deviations(self, of_probes: Tensor) -> Tensor:
        """How far each random vector is from the fit, in units of the trace."""
        y = of_probes - of_probes.mean(-1, keepdim=True)
        return self._rest * (y - self._slope(of_probes) * self._x) * self._leverage

    def _slope(self, of_probes: Tensor) -> Tensor:
        y = of_probes - of_probes.mean(-1, keepdim=True)
        return ((y * self._x).sum(-1, keepdim=True) / self._spread).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _half_width(deviations: Tensor) -> Tensor:
    return _STUDENT * (deviations.square().sum(-1) / ((PROBES - 2) * PROBES)).sqrt()


def _square(chains: Chains, trace: _Trace) -> Estimate:
    """Sum of squared eigenvalues: for a start vector, |Az|^2 = s1 (s1 + s2)."""
    basis, probes = (part[0] * (part[0] + part[1]) for part in (chains.basis, chains.probes))
    value, width = trace(basis, probes), _half_width(trace.deviations(probes))
    # At least what the basis holds, and by Cauchy-Schwarz what `side` equal eigenvalues would.
    least = basis.sum(-1).clamp_min(1.0 / chains.side)
    return Estimate(torch.maximum(value, least), torch.maximum(value - width, least), value + width)


@dataclass(frozen=True)
class _Roots:
    """Sums of the roots of the eigenvalues, and of root times -log, which the effective rank is made from."""

    root: Bounds
    entropy: Bounds
    root_deviations: Tensor
    entropy_deviations: Tensor

    def rank(self, more_root: Bounds, more_entropy: Bounds, smear: float) -> Estimate:
        """The effective rank after further eigenvalues were added."""
        corners = torch.stack(
            [
                _log_rank(root + root_mean, entropy + entropy_mean)
                for root, entropy in zip(self.root, self.entropy, strict=True)
                for root_mean, entropy_mean in zip(more_root, more_entropy, strict=True)
            ]
        )
        S, E = (_between(own + more) for own, more in ((self.root, more_root), (self.entropy, more_entropy)))
        # log rank = log S + E / 2S, linearised around the estimate, one deviation per random vector.
        tilt = (1.0 - E / (2.0 * S)).unsqueeze(-1)
        width = _half_width((self.entropy_deviations / 2.0 + tilt * self.root_deviations) / S.unsqueeze(-1))
        width = width + smear * (1.0 - math.log(smear)) / S
        value = _log_rank(S, E).exp()
        low, high = (corners.amin(0) - width).exp().clamp_min(1.0), (corners.amax(0) + width).exp()
        return Estimate(torch.maximum(value, low), low, high)


def _log_rank(S: Tensor, E: Tensor) -> Tensor:
    return S.log() + E / (2.0 * S)


def _between(bounds: Bounds) -> Tensor:
    """The Gauss rule is about four times as close as the Gauss-Radau rule."""
    return (bounds.low + 4.0 * bounds.high) / 5.0


def _grid(like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """t, and the weights of dt / (pi sqrt t) without and with a factor log t."""
    log_t = torch.arange(*_LOG_T, dtype=torch.float64, device=like.device)[:, None, None]
    weight = _LOG_T[2] * (0.5 * log_t).exp() / math.pi
    return log_t.exp(), weight, weight * log_t


class _Shares(NamedTuple):
    """Bounds on a function of the eigenvalues for each start vector."""

    basis: Bounds
    probes: Bounds

    @classmethod
    def of(cls, chains: Chains, t: Tensor) -> _Shares:
        r""":math:`\lambda / (\lambda + t)`, for all t."""
        return cls(*(Bounds(*(R / (t + R) for R in remainder_bounds(part, t))) for part in chains[:2]))

    def summed(self, weight: Tensor) -> _Shares:
        """The same for a weighted sum over t."""
        return _Shares(*(Bounds(*((part * weight).sum(0) for part in bounds)) for bounds in self))


def _roots(chains: Chains, trace: _Trace) -> _Roots:
    t, weight, log_weight = _grid(chains.probes)
    shares = _Shares.of(chains, t)
    roots, entropies = shares.summed(weight), shares.summed(-log_weight)
    return _Roots(
        trace.bounds(roots),
        trace.bounds(entropies),
        *(trace.deviations(_between(y.probes)) for y in (roots, entropies)),
    )


def _roots_of_mean(chain: Tensor, G: Tensor) -> tuple[Bounds, Bounds]:
    """What the mean adds to both sums: the same integrals, by parts, of log(1 + g)."""
    t, weight, log_weight = _grid(chain)
    R = remainder_bounds(chain, t)
    logs = [torch.log1p(G[:, None] / (t + R)) for R in (R.high, R.low)]
    roots = [0.5 * (log * weight).sum(0).squeeze(-1) for log in logs]
    entropies = [-(log * (weight + 0.5 * log_weight)).sum(0).squeeze(-1) for log in logs]
    return Bounds(*roots), Bounds(*entropies)


def _log_weight_bound(diagonal: Tensor, off: Tensor, x: Tensor) -> Tensor:
    """Log of the largest weight that a start vector can have at x, beyond all its nodes (Christoffel function)."""
    log_p, logs = torch.zeros_like(x), [torch.zeros_like(x)]
    ratio = x - diagonal[..., 0]
    for j in range(off.shape[-1]):
        log_p = log_p + 2.0 * ratio.clamp_min(1e-300).log() - off[..., j].log()
        logs.append(log_p)
        ratio = x - diagonal[..., j + 1] - off[..., j] / ratio
    return -torch.logsumexp(torch.stack(logs), 0)


def jacobi(squares: Tensor) -> tuple[Tensor, Tensor]:
    """Diagonal and squared off-diagonal of B^TB, from the squared entries of the bidiagonal matrix B."""
    odd, even = squares[0::2], squares[1::2]
    size = len(odd)
    diagonal = torch.cat([odd[:1], odd[1:] + even[: size - 1]])
    return diagonal.movedim(0, -1), (odd[: size - 1] * even[: size - 1]).movedim(0, -1)


_ROUNDS, _SECTIONS = 5, 32


def largest_eigenvalue(diagonal: Tensor, off: Tensor) -> Tensor:
    """Largest eigenvalue of small positive tridiagonal matrices, from below, to eight digits.

    LAPACK would do it in one call, but on an accelerator that call waits for the device.
    """
    # Between the largest entry of the diagonal and the sum of two rows; then 32 sections five times.
    low = diagonal.amax(-1)
    width = 2.0 * off.amax(-1).sqrt()
    inside = torch.arange(1, _SECTIONS, dtype=low.dtype, device=low.device).reshape(-1, *(1,) * low.ndim)
    for _ in range(_ROUNDS):
        width = width / _SECTIONS
        x = low + inside * width
        # All pivots of x - T are positive if and only if x is above all eigenvalues.
        pivot = x - diagonal[..., 0]
        is_above = pivot > 0
        for j in range(off.shape[-1]):
            pivot = x - diagonal[..., j + 1] - off[..., j] / pivot.clamp_min(1e-300)
            is_above &= pivot > 0
        low = low + (~is_above).sum(0) * width
    return low


def _largest(chains: Chains, square: Estimate, slack: float) -> Bounds:
    """The largest eigenvalue: at least the largest node; larger ones are excluded by what would have been seen.

    An eigenvector beyond the nodes has at least half of its square inside or outside the span of the basis. Inside, the
    vectors of the basis would share a weight of 1/2 at its eigenvalue; outside, each random vector would have a
    random one. The Christoffel function bounds the weight a vector can have there, given its coefficients.
    """
    matrices = [jacobi(part) for part in (chains.basis, chains.probes)]
    low = torch.maximum(*(largest_eigenvalue(*matrix).amax(-1) for matrix in matrices))
    x = (low * (1.0 + slack))[:, None] * (1.0 + _EXCESS.to(low.device)[:, None, None])
    basis, probes = (_log_weight_bound(*matrix, x.expand(-1, -1, matrix[0].shape[1])) for matrix in matrices)
    outside = torch.erf(((chains.side - DEFLATED) * probes.exp()).sqrt()).log().sum(-1)
    excluded = (basis.exp().sum(-1) < 0.5) & (outside < _UNSEEN)
    high = torch.where(excluded, x.squeeze(-1), torch.inf).amin(0)
    # The square of the largest is at most the sum of all squares, and it is at most the energy.
    return Bounds(low, torch.maximum(torch.minimum(high, square.high.sqrt()).clamp_max(1.0), low * (1.0 + slack)))


def _largest_with_mean(chain: Tensor, top: Bounds, G: Tensor, slack: float) -> Bounds:
    """The largest eigenvalue of A + G mm^T for a unit vector m.

    In the basis of the chain of m, A is tridiagonal up to a corner that is at most its largest eigenvalue: with that
    corner the matrix is an upper bound, without it a lower one.
    """
    diagonal, off = (part.squeeze(1) for part in jacobi(chain))
    diagonal = diagonal + torch.nn.functional.pad(G.unsqueeze(-1), (0, diagonal.shape[-1] - 1))
    low = largest_eigenvalue(diagonal, off)
    bordered = torch.cat([diagonal[:, :-1], top.high.unsqueeze(-1)], -1)
    high = largest_eigenvalue(bordered, off)
    return Bounds(torch.maximum(low, top.low), torch.maximum(high * (1.0 + slack), top.high))


# With t at this angle in the complex plane, lambda / (lambda + t) is a step in log lambda with the first three moments
# of a sharp one.
_ANGLE = math.pi / math.sqrt(3.0)


def _count_to_99(chains: Chains, trace: _Trace, G: Tensor, slack: float) -> Estimate:
    r"""Fewest eigenvalues that hold 99% of the energy, from the trace K(t) of :math:`A(A + t)^{-1}`.

    The eigenvalues beyond the first k = r - 1 still hold 1%, and none is larger than the k-th, a. So
    :math:`K(t) (a + t) \ge ka + 0.01`, and :math:`k \le K(t)` for every t with :math:`tK(t) \le 0.01`. The first r hold
    99%, so by concavity :math:`K(t) \le 1/(1/r + t) + 0.01/t`, which bounds r from below. The mean adds to K at most
    :math:`g/(1+g)`.
    """
    whole, share = 1.0 + G, 0.01 * (1.0 + G)
    t, _, _ = _grid(chains.probes)
    shares = _Shares.of(chains, t)
    K, width = trace.bounds(shares), _half_width(trace.deviations(_between(shares.probes)))
    g = G[:, None] / (t + remainder_bounds(chains.mean, t).low)
    t, g = t.squeeze(-1), g.squeeze(-1)
    high = K.high + width + g / (1.0 + g)
    most = 1.0 + torch.where(t * high <= share, high, torch.inf).amin(0)
    # k orthonormal vectors hold no more than the k strongest directions: few vectors that hold 99% are a bound too.
    held = torch.cat([G[:, None] + chains.mean[0], chains.basis[0].sort(-1, descending=True).values.cumsum(-1)], -1)
    number = torch.arange(DEFLATED + 1, dtype=t.dtype, device=t.device).clamp_min(1.0)
    most = torch.minimum(most, torch.where(held * (1.0 - slack) >= 0.99 * whole[:, None], number, torch.inf).amin(-1))
    held = (K.low - width - share / t).clamp_min(0.0)
    least = (1.0 / (1.0 / held - t / whole)).where(held > 0, 1.0).amax(0)
    least = (least - 1e-6).ceil().clamp(1.0, float(chains.side))
    most = torch.maximum(most.floor().clamp_max(float(chains.side)), least)

    turned = torch.polar(t.unsqueeze(-1), torch.full_like(t.unsqueeze(-1), _ANGLE))
    steps = [_between(bounds) for bounds in _Shares.of(chains, turned)]
    count, tail = (trace(*(part.real for part in parts)) for parts in (steps, [turned * part for part in steps]))
    last = (tail <= share).sum(0).clamp(1, len(tail) - 1)
    pick = torch.stack([last - 1, last])
    (t0, t1), (c0, c1) = tail.gather(0, pick), count.gather(0, pick)
    value = c0 + (c1 - c0) * ((share - t0) / (t1 - t0)).nan_to_num(nan=0.0).clamp(0.0, 1.0) + G / whole
    return Estimate(value.round().clamp(least, most), least, most)
