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

from rankscope.linalg.precision import float64_home

DEFLATED, PROBES, POWERS, STEPS, BASIS_STEPS = 16, 15, 2, 16, 5
LEAST_SIDE = 128
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
# Rounding of a node, in units of eps: 140 were seen where a chain ends at once (many equal singular values).
_SLACK = 512.0
_EXCESS = torch.logspace(-6, 0, 25, dtype=torch.float64)


class RankEstimate(NamedTuple):
    """A value per matrix, and the interval that contains the exact one."""

    value: Float[Tensor, " matrices"]
    low: Float[Tensor, " matrices"]
    high: Float[Tensor, " matrices"]


@dataclass(frozen=True)
class RankEstimates:
    """Ranks of a stack of matrices."""

    stable_rank: RankEstimate
    effective_rank: RankEstimate
    participation_ratio: RankEstimate
    energy_rank_99: RankEstimate

    def where(self, condition: Tensor) -> RankEstimates:
        """NaN for matrices for which the condition does not hold."""
        parts = (getattr(self, part.name) for part in fields(self))
        return RankEstimates(*(RankEstimate(*(end.where(condition, math.nan) for end in part)) for part in parts))


class PlainAndCentred(NamedTuple):
    """Ranks of X and of CX."""

    plain: RankEstimates
    centred: RankEstimates

    def where(self, plain: Tensor, centred: Tensor) -> PlainAndCentred:
        """NaN for matrices for which a condition does not hold."""
        return PlainAndCentred(self.plain.where(plain), self.centred.where(centred))


class Chains(NamedTuple):
    """Squared coefficients of the bidiagonalisations of W, in units of its energy.

    ``squares`` has one row per coefficient, zero beyond the end of a chain, then the matrices, then the start vectors:
    the random ones, the mean, the basis. All but the mean start on the smaller side, of size ``side``.
    """

    squares: Float[Tensor, "coefficients matrices vectors"]
    side: int
    mean_length: int


_MEAN = PROBES
_BASIS = slice(PROBES + 1, None)


def bidiagonalised(
    W: Float[Tensor, "matrices tokens dim"], mean: Float[Tensor, "matrices dim"], energy: Float[Tensor, " matrices"]
) -> Chains:
    """Coefficients of all start vectors of a stack of centred matrices.

    Args:
        W: the matrices, scaled so that ``energy``, the sum of their squares, neither overflows nor underflows.
        mean: unit vectors.
        energy: in float64; it may be on the CPU while W is on a device without float64.
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
        Q = _orthonormal(Q @ out @ out.mT)
    Z = draw(PROBES)
    for _ in range(2):  # once leaves float32 rounding of the strongest directions, which would count them twice
        Z = Z - (Z @ Q.mT) @ Q
    Z, _ = _unit(Z)
    mean = mean.unsqueeze(1)
    # The mean of the tokens is a vector of channels. If the smaller side is that of the tokens, its chain starts on the
    # larger side, one coefficient later: zero stands for what would come before.
    small = torch.cat([Z, torch.zeros_like(Z[:, :1]) if by_tokens else mean, Q], 1)
    large, c = _unit(small @ out)
    if by_tokens:
        large[:, _MEAN : _MEAN + 1] = mean
    found = [c]
    for step in range(1, 2 * STEPS):
        if step == 2 * BASIS_STEPS:
            small, large, c = (part[:, : _MEAN + 1] for part in (small, large, c))
        if step % 2:
            small, c = _unit(torch.baddbmm(-c.unsqueeze(-1) * small, large, out.mT))
        else:
            large, c = _unit(torch.baddbmm(-c.unsqueeze(-1) * large, small, out))
        found.append(c)
    early, late = torch.stack(found[: 2 * BASIS_STEPS]), torch.stack(found[2 * BASIS_STEPS :])
    joint = torch.cat([early, torch.nn.functional.pad(late, (0, DEFLATED))])
    if by_tokens:
        joint[:, :, _MEAN] = torch.nn.functional.pad(joint[1:, :, _MEAN], (0, 0, 0, 1))
    squares = (joint.to(energy.device).double() / energy.sqrt().unsqueeze(-1)).square()
    return Chains(squares, side, 2 * STEPS - int(by_tokens))


def joined(parts: Sequence[Chains]) -> Chains:
    """The chains of several stacks as those of one."""
    return parts[0]._replace(squares=torch.cat([part.squares for part in parts], 1))


def _orthonormal(rows: Float[Tensor, "matrices vectors side"]) -> Tensor:
    """An orthonormal basis of their span, as rows.

    A device without float64 has no fast QR of a tall matrix either (Apple's); copying a few vectors there and back is
    cheap beside the products.
    """
    basis: Tensor = torch.linalg.qr(rows.to(float64_home(rows)).mT).Q.mT
    return basis.to(rows.device)


def _unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """Unit vectors and lengths; a vector of length zero, where a chain ends, stays zero."""
    length = torch.linalg.vector_norm(x, dim=-1)
    return x / length.clamp_min(torch.finfo(x.dtype).tiny).unsqueeze(-1), length


def remainders(chains: Chains, t: Float[Tensor, "levels 1 1 1"]) -> Tensor:
    """Lower and upper bounds on R(t), ``(levels, 2, matrices, vectors)``: cut after an even and an odd coefficient."""
    low, high = chains.squares.clone(), chains.squares.clone()
    for vectors, length in ((slice(PROBES), 2 * STEPS), (_MEAN, chains.mean_length), (_BASIS, 2 * BASIS_STEPS)):
        (low if length % 2 else high)[length - 1, :, vectors] = 0.0
    squares = torch.stack([low, high], 1)
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
    log_t = torch.arange(*_LOG_T, dtype=torch.float64, device=mean_energy.device)[:, None, None, None]
    t = log_t.exp()
    R = remainders(chains, t)
    shares = R / (t + R)
    # Upper and lower bounds change places: g falls with R.
    g = (mean_energy / (t.squeeze(-1) + R[..., _MEAN])).flip(1)
    G, none = mean_energy, torch.zeros_like(mean_energy)
    slack = _SLACK * eps + _RESOLUTION
    square = _square(chains, trace)
    mean_square = G * (G + 2.0 * chains.squares[0, :, _MEAN])
    roots = _Roots.of(shares, log_t, trace, 4.0 * eps * math.sqrt(chains.side))
    levels = _Levels.of(chains, trace, t, shares)
    top = _largest(chains, square.high, G, slack)
    return PlainAndCentred(
        plain=RankEstimates(
            stable_rank=_stable_rank(1.0 + G, top.plain, slack),
            effective_rank=roots.rank(*_roots_of_mean(g, log_t)),
            participation_ratio=_participation_ratio(
                1.0 + G, RankEstimate(*(part + mean_square for part in square)), slack
            ),
            energy_rank_99=levels.count_to_99(G, g[:, 1] / (1.0 + g[:, 1]), slack),
        ),
        centred=RankEstimates(
            stable_rank=_stable_rank(1.0 + none, top.centred, slack),
            effective_rank=roots.rank(none.expand(2, -1), none.expand(2, -1)),
            participation_ratio=_participation_ratio(1.0 + none, square, slack),
            energy_rank_99=levels.count_to_99(none, none, slack),
        ),
    )


def _stable_rank(whole: Tensor, largest: Bounds, slack: float) -> RankEstimate:
    value = whole / largest.low
    return RankEstimate(value, (whole / largest.high).clamp_min(1.0), value * (1.0 + slack))


def _participation_ratio(whole: Tensor, square: RankEstimate, slack: float) -> RankEstimate:
    whole = whole.square()
    low = (whole / square.high * (1.0 - slack)).clamp_min(1.0)
    return RankEstimate(whole / square.value, low, whole / square.low * (1.0 + slack))


class _Trace:
    """Sums over all directions: exact over the basis, estimated over the rest, with the energy as control variate."""

    def __init__(self, chains: Chains) -> None:
        self._rest = chains.side - DEFLATED
        x, basis = chains.squares[0, :, :PROBES], chains.squares[0, :, _BASIS]
        known = (1.0 - basis.sum(-1, keepdim=True)).clamp_min(0.0) / self._rest
        self._x = x - x.mean(-1, keepdim=True)
        self._spread = self._x.square().sum(-1, keepdim=True)
        # The mean over the random vectors is within a few standard errors of the known one. If it is not, the basis
        # holds all but rounding, and nothing is left to correct.
        error = (self._spread / (PROBES * (PROBES - 1))).sqrt()
        self._move = (known - x.mean(-1, keepdim=True)).clamp(-_STUDENT * error, _STUDENT * error)
        self._leverage = (1.0 + PROBES * self._move.square() / self._spread).nan_to_num(nan=1.0).sqrt()

    def __call__(self, of_vectors: Float[Tensor, "*levels matrices vectors"]) -> Float[Tensor, "*levels matrices"]:
        of_probes = of_vectors[..., :PROBES]
        rest = of_probes.mean(-1) + (self._slope(of_probes) * self._move).squeeze(-1)
        return of_vectors[..., _BASIS].sum(-1) + self._rest * rest

    def deviations(self, of_vectors: Float[Tensor, "*levels matrices vectors"]) -> Tensor:
        """How far each random vector is from the fit, in units of the trace."""
        of_probes = of_vectors[..., :PROBES]
        y = of_probes - of_probes.mean(-1, keepdim=True)
        return self._rest * (y - self._slope(of_probes) * self._x) * self._leverage

    def _slope(self, of_probes: Tensor) -> Tensor:
        return ((of_probes * self._x).sum(-1, keepdim=True) / self._spread).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def _half_width(deviations: Tensor) -> Tensor:
    return _STUDENT * (deviations.square().sum(-1) / ((PROBES - 2) * PROBES)).sqrt()


def _between(bounds: Tensor, axis: int = 0) -> Tensor:
    """An estimate between the bounds: the Gauss rule is about four times as close as the Gauss-Radau rule."""
    low, high = bounds.unbind(axis)
    return (low + 4.0 * high) / 5.0


def _square(chains: Chains, trace: _Trace) -> RankEstimate:
    """Sum of squared eigenvalues: for a start vector, |Az|^2 = s1 (s1 + s2)."""
    first, second = chains.squares[:2]
    squares = first * (first + second)
    value, width = trace(squares), _half_width(trace.deviations(squares))
    # At least what the basis holds, and by Cauchy-Schwarz what `side` equal eigenvalues would.
    least = squares[..., _BASIS].sum(-1).clamp_min(1.0 / chains.side)
    return RankEstimate(torch.maximum(value, least), torch.maximum(value - width, least), value + width)


@dataclass(frozen=True)
class _Roots:
    """Sums of the roots of the eigenvalues, and of root times -log, which the effective rank is made from.

    Both as bounds without the error of the random vectors, and the deviation of each random vector. ``smear`` is the
    rounding of the first sum: W is off by a matrix of norm eps |W|, and the sum of singular values by sqrt(side) times
    that.
    """

    root: Float[Tensor, "2 matrices"]
    entropy: Float[Tensor, "2 matrices"]
    root_deviations: Float[Tensor, "matrices probes"]
    entropy_deviations: Float[Tensor, "matrices probes"]
    smear: float

    @classmethod
    def of(cls, shares: Tensor, log_t: Tensor, trace: _Trace, smear: float) -> _Roots:
        r"""From :math:`\lambda/(\lambda + t)` at all levels t."""
        weight = _weight(log_t)
        root, entropy = (shares * weight).sum(0), -(shares * (weight * log_t)).sum(0)
        of_root, of_entropy = (trace.deviations(_between(sums)) for sums in (root, entropy))
        return cls(trace(root), trace(entropy), of_root, of_entropy, smear)

    def rank(self, more_root: Float[Tensor, "2 matrices"], more_entropy: Float[Tensor, "2 matrices"]) -> RankEstimate:
        """The effective rank after the mean was added."""
        # All four combinations of bounds, those of W with those of the mean.
        corners = _log_rank(self.root[:, None] + more_root, self.entropy[:, None] + more_entropy).flatten(0, 1)
        S, E = _between(self.root + more_root), _between(self.entropy + more_entropy)
        # log rank = log S + E / 2S, linearised around the estimate, one deviation per random vector.
        tilt = (1.0 - E / (2.0 * S)).unsqueeze(-1)
        width = _half_width((self.entropy_deviations / 2.0 + tilt * self.root_deviations) / S.unsqueeze(-1))
        width = width + self.smear * (1.0 - math.log(self.smear)) / S
        low, high = (corners.amin(0) - width).exp().clamp_min(1.0), (corners.amax(0) + width).exp()
        return RankEstimate(torch.maximum(_log_rank(S, E).exp(), low), low, high)


def _log_rank(S: Tensor, E: Tensor) -> Tensor:
    return S.log() + E / (2.0 * S)


def _weight(log_t: Tensor) -> Tensor:
    """Weights of the trapezoidal rule for dt / (pi sqrt t)."""
    return _LOG_T[2] * (0.5 * log_t).exp() / math.pi


def _roots_of_mean(g: Float[Tensor, "levels 2 matrices"], log_t: Tensor) -> tuple[Tensor, Tensor]:
    """What the mean adds to both sums: the same integrals, by parts, of log(1 + g)."""
    logs, log_t = torch.log1p(g), log_t.squeeze(-1)
    weight = _weight(log_t)
    return 0.5 * (logs * weight).sum(0), -(logs * (weight * (1.0 + 0.5 * log_t))).sum(0)


class Bounds(NamedTuple):
    """A lower and an upper bound."""

    low: Float[Tensor, " matrices"]
    high: Float[Tensor, " matrices"]


class _Largest(NamedTuple):
    """Bounds on the largest eigenvalue of X^TX and of A."""

    plain: Bounds
    centred: Bounds


_ROUNDS, _SECTIONS = 3, 256
_RESOLUTION = float(_SECTIONS) ** -_ROUNDS


def jacobi(squares: Tensor) -> tuple[Tensor, Tensor]:
    """Diagonal and squared off-diagonal of B^TB, last axis, from the squared entries of the bidiagonal matrix B."""
    odd, even = squares[0::2], squares[1::2]
    diagonal = torch.cat([odd[:1], odd[1:] + even[:-1]])
    return diagonal.movedim(0, -1), (odd[:-1] * even[:-1]).movedim(0, -1)


def largest_eigenvalue(diagonal: Tensor, off: Tensor) -> Tensor:
    """Largest eigenvalue of small positive tridiagonal matrices, from below, to seven digits.

    LAPACK would do it in one call, but on an accelerator that call waits for the device.
    """
    # It is between the largest entry of the diagonal and that plus the largest two off-diagonal ones.
    low, width = diagonal.amax(-1), 2.0 * off.amax(-1).sqrt()
    inside = torch.arange(1, _SECTIONS, dtype=low.dtype, device=low.device).reshape(-1, *(1,) * low.ndim)
    for _ in range(_ROUNDS):
        width = width / _SECTIONS
        low = low + (~_is_above(low + inside * width, diagonal, off)).sum(0) * width
    return low


def _pivots(x: Tensor, diagonal: Tensor, off: Tensor) -> Tensor:
    """Pivots of x - T, first axis; all are positive if and only if x is above all eigenvalues."""
    shifted = x.unsqueeze(-1) - diagonal
    found = [shifted[..., 0]]
    for j in range(off.shape[-1]):
        found.append(shifted[..., j + 1] - off[..., j] / found[-1].clamp_min(1e-300))
    return torch.stack(found)


def _is_above(x: Tensor, diagonal: Tensor, off: Tensor) -> Tensor:
    return (_pivots(x, diagonal, off) > 0).all(0)


def _log_weight_bound(x: Tensor, diagonal: Tensor, off: Tensor) -> Tensor:
    """Log of the largest weight that a start vector can have at x, above all its nodes (Christoffel function)."""
    # The orthonormal polynomials p_j of the chain at x: the j-th pivot is the ratio of two monic ones.
    steps = 2.0 * _pivots(x, diagonal, off)[:-1].clamp_min(1e-300).log() - off.movedim(-1, 0)[:, None].log()
    return -torch.logsumexp(torch.nn.functional.pad(steps.cumsum(0).movedim(0, -1), (1, 0)), -1)


def _largest(chains: Chains, most_square: Tensor, G: Tensor, slack: float) -> _Largest:
    """The largest eigenvalue: at least the largest node; larger ones are excluded by what would have been seen.

    An eigenvector beyond the nodes has at least half of its square inside or outside the span of the basis. Inside, the
    vectors of the basis would share a weight of 1/2 at its eigenvalue; outside, each random vector would have a random
    one. The Christoffel function bounds the weight a vector can have there, given its coefficients.

    With the mean, :math:`A + G mm^T`: in the basis of the chain of m, A is tridiagonal up to a corner that is at most
    its largest eigenvalue. With that corner the matrix is an upper bound, without it a lower one.
    """
    diagonal, off = jacobi(chains.squares)
    with_mean = diagonal[:, _MEAN] + torch.nn.functional.pad(G[:, None], (0, diagonal.shape[-1] - 1))
    nodes = largest_eigenvalue(torch.cat([diagonal, with_mean[:, None]], 1), torch.cat([off, off[:, _MEAN, None]], 1))
    low = nodes[:, :-1].amax(-1)
    x = (low * (1.0 + slack)) * (1.0 + _EXCESS.to(low.device)[:, None])
    probes = _log_weight_bound(x[..., None], diagonal[:, :PROBES], off[:, :PROBES])
    basis = _log_weight_bound(x[..., None], diagonal[:, _BASIS, :BASIS_STEPS], off[:, _BASIS, : BASIS_STEPS - 1])
    outside = torch.erf(((chains.side - DEFLATED) * probes.exp()).sqrt()).log().sum(-1)
    excluded = (basis.exp().sum(-1) < 0.5) & (outside < _UNSEEN)
    # The square of the largest is at most the sum of all squares, and it is at most the energy.
    high = torch.where(excluded, x, torch.inf).amin(0).minimum(most_square.sqrt()).clamp_max(1.0)
    centred = Bounds(low, high.maximum(low * (1.0 + slack)))

    low = nodes[:, -1].maximum(low)
    x = (low * (1.0 + slack)) * (1.0 + _EXCESS.to(low.device)[:, None])
    bordered = torch.cat([with_mean[:, :-1], centred.high[:, None]], -1)
    above = _is_above(x, bordered, off[:, _MEAN])
    high = torch.where(above, x, torch.inf).amin(0).minimum(G + centred.high)
    return _Largest(Bounds(low, high.maximum(low * (1.0 + slack))), centred)


# With t at this angle in the complex plane, lambda / (lambda + t) is a step in log lambda with the first three moments
# of a sharp one.
_ANGLE = math.pi / math.sqrt(3.0)


@dataclass(frozen=True)
class _Levels:
    """By level t: bounds on the trace K(t) of A / (A + t), the number of eigenvalues above t and the energy below.

    ``held`` is the energy in the directions of the basis, and of the mean.
    """

    t: Float[Tensor, "levels 1"]
    low: Float[Tensor, "levels matrices"]
    high: Float[Tensor, "levels matrices"]
    count: Float[Tensor, "levels matrices"]
    tail: Float[Tensor, "levels matrices"]
    held: Float[Tensor, "matrices deflated"]
    of_mean: Float[Tensor, " matrices"]
    side: int

    @classmethod
    def of(cls, chains: Chains, trace: _Trace, t: Tensor, shares: Tensor) -> _Levels:
        r"""From :math:`\lambda/(\lambda + t)` at all levels t."""
        K, width = trace(shares), _half_width(trace.deviations(_between(shares, 1)))
        turned = torch.polar(t, torch.full_like(t, _ANGLE))
        R = remainders(chains, turned)
        steps = _between(R / (turned + R), 1)
        count, tail = trace(steps.real), trace((turned[:, 0] * steps).real)
        # k orthonormal vectors hold no more than the k strongest directions.
        held = chains.squares[0, :, _BASIS].sort(-1, descending=True).values.cumsum(-1)
        of_mean = chains.squares[0, :, _MEAN]
        return cls(t[:, 0, 0], K[:, 0] - width, K[:, 1] + width, count, tail, held, of_mean, chains.side)

    def count_to_99(self, G: Tensor, more: Tensor, slack: float) -> RankEstimate:
        r"""Fewest eigenvalues r that hold 99% of the energy, after a mean of energy G added ``more`` to K.

        The eigenvalues beyond the first k = r - 1 still hold 1%, and none is larger than the k-th, a. So
        :math:`K(t)(a + t) \ge ka + 0.01`, and :math:`k \le K(t)` for every t with :math:`tK(t) \le 0.01`. The first r
        hold 99%, so by concavity :math:`K(t) \le 1/(1/r + t) + 0.01/t`, which bounds r from below.
        """
        t, whole, share = self.t, 1.0 + G, 0.01 * (1.0 + G)
        high = self.high + more
        most = 1.0 + torch.where(t * high <= share, high, torch.inf).amin(0)
        held = torch.cat([(G + self.of_mean)[:, None], self.held], -1)
        number = torch.arange(DEFLATED + 1, dtype=t.dtype, device=t.device).clamp_min(1.0)
        enough = held * (1.0 - slack) >= 0.99 * whole[:, None]
        most = most.minimum(torch.where(enough, number, torch.inf).amin(-1)).clamp_max(float(self.side))
        left = (self.low - share / t).clamp_min(0.0)
        least = torch.where(left > 0, 1.0 / (1.0 / left - t / whole), 1.0).amax(0)
        least = (least * (1.0 - slack)).ceil().clamp(1.0, float(self.side))
        most = most.floor().maximum(least)
        last = (self.tail <= share).sum(0).clamp(1, len(self.tail) - 1)
        place = torch.stack([last - 1, last])
        (tail, next_tail), (count, next_count) = self.tail.gather(0, place), self.count.gather(0, place)
        part = ((share - tail) / (next_tail - tail)).nan_to_num(nan=0.0).clamp(0.0, 1.0)
        # The mean moves one eigenvalue to above the others.
        value = count + (next_count - count) * part + G / whole
        return RankEstimate(value.round().clamp(least, most), least, most)
