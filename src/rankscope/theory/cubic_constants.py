r"""Constants of the cubic law that hold for every direction, or for every direction with given singular values. Ours.

Per head :math:`a_h = s\|A_h\|_2` and :math:`w_h = \|W_h\|_2`.

* **Above, always**: :math:`\|R'\|_F \le \frac12 \sum_h a_hw_h\,\|R\|_F^3` for every R, large or small, any biases. In
  the proof in ``cubic_bounds`` stop at the first derivative: a row is at most :math:`D_i\Delta/4`, with
  :math:`\Delta \le \sqrt2 w\|R\|_F` and :math:`D_i \le \sqrt2 a\|r_i\|\|R\|_F`. Two tokens attain it in the limit.
* **Above, leading term**: :math:`\|T(R)\|_F \le \frac1n\sum_h a_hw_h\,\|R\|_F^3`.
* **Below, leading term, every direction**: zero in general, because the map has kernels. For one head and R of rank one
  along v it is proportional to :math:`v^TAv`, which vanishes somewhere unless the symmetric part of A is definite; a
  head narrower than the tokens has a kernel anyway; several heads may cancel. For one head with
  :math:`|v^TAv| \ge m\|v\|^2`: :math:`\|T(R)\|_F \ge \frac{s}{nk} m\, s_{\min}(W) \|R\|_F^3`, k the rank of R, because
  :math:`\|RAR^TR\|\,\|R\| \ge |\mathrm{tr}\,RAR^TRR^T| \ge m\|RR^T\|_F^2 \ge m\|R\|_F^4/k`.
* **Below, on the span of R**: with :math:`R = USV^T` of rank k, :math:`M_h = V^TA_hV`, and N the rows :math:`V^TW_h` of
  all heads stacked,

  .. math:: \|T(R)\|_F \ge \frac{s}{n}\, s_{\min}(N) \sqrt{\textstyle\sum_h s_{\min}(M_h)^2 \sum_i s_i^2s_{k+1-i}^4} .

  The sum pairs the largest singular value with the smallest: the worst case (trace inequality with Ostrowski's), and
  attained. It is positive only where k is at most the head widths and heads times k at most dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from rankscope._citations import Cite
from rankscope._errors import InputError
from rankscope.theory.attention_weights import AttentionWeights, HeadTensors, float64_heads
from rankscope.theory.operator_norms import head_norms, query_norms
from rankscope.theory.scaled import centred_unit

# The published bound of the same shape, in another norm, under a hypothesis on the scores.
COMPARED_WITH = Cite("dong2021attention", "thm. 2.2")


@dataclass(frozen=True)
class CubicConstants:
    """Bounds on c of log||R'|| = 3 log||R|| + c, in the limit of small R.

    Attributes:
        log_lower_bound: -inf where no positive one holds.
        log_upper_bound: from operator norms.
        reason: where the lower bound comes from, or why there is none.
    """

    log_lower_bound: float
    log_upper_bound: float
    reason: str


def global_cubic_bound(heads: AttentionWeights) -> float:
    r"""Log of :math:`\frac12\sum_h a_hw_h`: :math:`\|R'\|_F \le \frac12\sum_h a_hw_h\|R\|_F^3` whatever R. **Bound**.

    One layer of attention without skip, complete mask, position-free. The residual falls doubly exponentially from any
    layer on where :math:`\|R\|_F^2` times this is below 1 in all later layers.

    Example:
        >>> from rankscope.theory.attention_weights import head_tensors
        >>> eye = torch.eye(2, dtype=torch.float64).unsqueeze(0)
        >>> round(torch.tensor(global_cubic_bound(head_tensors(eye, 2 * eye, eye, 3 * eye, scale=1.0))).exp().item(), 6)
        3.0
    """
    norms = head_norms(float64_heads(heads))
    return float(((norms.score * norms.value).sum() / 2).log())


def uniform_constants(heads: AttentionWeights, tokens: int) -> CubicConstants:
    """Constants for every direction of R at once. **Bound**, both ways.

    Example:
        >>> from rankscope.theory.attention_weights import head_tensors
        >>> eye = torch.eye(2, dtype=torch.float64).unsqueeze(0)
        >>> found = uniform_constants(head_tensors(eye, eye, eye, eye, scale=1.0), tokens=2)
        >>> [round(torch.tensor(bound).exp().item(), 6) for bound in (found.log_lower_bound, found.log_upper_bound)]
        [0.5, 0.5]
    """
    if tokens < 2:
        raise InputError(
            f"The cubic law was asked for {tokens} tokens. Expected at least two: one is always collapsed."
        )
    wide = float64_heads(heads)
    norms = head_norms(wide)
    upper = (norms.score * norms.value).sum() / tokens
    eye = torch.eye(wide.W_Q.shape[1], dtype=torch.float64, device=wide.W_Q.device)
    rank = min(tokens - 1, eye.shape[0])
    lower, reason = _definite(wide, eye, rank)
    return CubicConstants(float((lower / tokens).log()), float(upper.log()), reason)


def span_constants(R: Float[Tensor, "tokens dim"], heads: AttentionWeights) -> CubicConstants:
    r"""Constants from the singular values of one centred R and of the heads on its span. **Bound**, both ways.

    Every R with the same right singular vectors and singular values lies between them, whatever its left ones. The rank
    is counted to rounding; directions of R below that are left out of the span.

    Raises:
        InputError: R is zero, or a batch.

    Example:
        >>> from rankscope.theory.attention_weights import head_tensors
        >>> one = torch.ones(1, 1, 1, dtype=torch.float64)
        >>> found = span_constants(torch.tensor([[1.0], [-1.0]]), head_tensors(one, one, one, one))
        >>> [round(torch.tensor(bound).exp().item(), 6) for bound in (found.log_lower_bound, found.log_upper_bound)]
        [0.5, 0.5]
    """
    D, log_r = centred_unit(R, 0.0)
    if D.ndim != 2 or not bool(log_r.isfinite()):
        raise InputError(f"R of shape {tuple(R.shape)} has no span to bound on. Expected one matrix that is not zero.")
    wide = float64_heads(heads)
    _, S, Vh = torch.linalg.svd(D, full_matrices=False)
    least = S[0] * max(D.shape) * torch.finfo(torch.float64).eps
    rank = int((least < S).sum())
    S, V = S[:rank], Vh[:rank].T
    lower, reason = max((_paired(wide, V, S), _definite(wide, V, rank)), key=lambda found: float(found[0]))
    # head by head: ||U S M S^2 V^T W|| <= ||S M S^2||_F ||V^T W||_2
    upper = sum(
        (torch.linalg.matrix_norm(S[:, None] * M * S.square()) * w for M, w in _on_span(wide, V)), S.new_zeros(())
    )
    return CubicConstants(float((lower / D.shape[0]).log()), float((upper / D.shape[0]).log()), reason)


def uniform_interval(
    heads: AttentionWeights, log_residual: float, tokens: int, base: Float[Tensor, " dim"]
) -> tuple[float, float]:
    r"""(log_lower_bound, log_upper_bound) on :math:`\log\|R'\|_F` from :math:`\log\|R\|_F` alone. **Bound**, no limit.

    With the constants of ``uniform_constants`` and the errors of ``cubic_bounds`` in operator norms:
    :math:`K_1 \le \frac{\sqrt2}{2}\sum\kappa_ha_hw_h r^4`, :math:`K_2 \le \frac{\sqrt2}{4}\sum a_h^2w_h r^5`,
    :math:`\kappa_h = \|sW_{K,h}(xW_{Q,h}+b_{Q,h})^T\|`. The lower bound is -inf unless there is one head and the
    symmetric part of its A is definite.

    Example:
        >>> from rankscope.theory.attention_weights import head_tensors
        >>> one = torch.ones(1, 1, 1, dtype=torch.float64)
        >>> low, high = uniform_interval(head_tensors(one, one, one, one), -50.0, 2, torch.zeros(1))
        >>> [round(torch.tensor(bound + 150).exp().item(), 6) for bound in (low, high)]
        [0.5, 0.5]
    """
    wide = float64_heads(heads)
    limit = uniform_constants(heads, tokens)
    norms, kappa = head_norms(wide), query_norms(wide, base)
    r = math.exp(log_residual)
    first = float((kappa * norms.score * norms.value).sum()) * 2**-0.5
    second = float((norms.score.square() * norms.value).sum()) * 2**-1.5
    remainder = r * first + r * r * second
    least = math.exp(limit.log_lower_bound) - remainder
    most = min(_log(math.exp(limit.log_upper_bound) + remainder), global_cubic_bound(heads))
    slack = (8 * wide.W_Q.shape[1] + abs(log_residual)) * 8 * torch.finfo(torch.float64).eps
    return 3 * log_residual + _log(least) - slack, 3 * log_residual + most + slack


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _on_span(heads: HeadTensors, V: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Per head scale * V^T A V, and the spectral norm of V^T W."""
    scores = heads.scale * (V.T @ heads.W_Q) @ (V.T @ heads.W_K).transpose(-1, -2)
    values = torch.linalg.matrix_norm(V.T @ heads.W_V @ heads.W_O, 2)
    return list(zip(scores, values, strict=True))


def _paired(heads: HeadTensors, V: Tensor, S: Tensor) -> tuple[Tensor, str]:
    """The bound on the span from smallest singular values, S largest first."""
    count, rank, dim = heads.W_Q.shape[0], S.shape[0], V.shape[0]
    if count * rank > dim:
        return S.new_zeros(()), f"heads may cancel: {count} heads on a span of {rank} in {dim} dimensions"
    stacked = (V.T @ heads.W_V @ heads.W_O).reshape(count * rank, dim)
    least = torch.stack([torch.linalg.svdvals(M)[-1] for M, _ in _on_span(heads, V)])
    pairing = (S.square() * S.flip(0).pow(4)).sum()
    lower = torch.linalg.svdvals(stacked)[-1] * (least.square().sum() * pairing).sqrt()
    return lower, "smallest singular values on the span of R"


def _definite(heads: HeadTensors, V: Tensor, rank: int) -> tuple[Tensor, str]:
    """The bound from a definite symmetric part on the span of the orthonormal columns V."""
    zero = V.new_zeros(())
    if heads.W_Q.shape[0] > 1:
        return zero, "none: several heads may cancel"
    A = _on_span(heads, V)[0][0]
    spectrum = torch.linalg.eigvalsh((A + A.T) / 2)
    if not bool(spectrum[0] * spectrum[-1] > 0):
        return zero, "none: the symmetric part of W_Q W_K^T is not definite, so some direction is sent to zero"
    least = torch.linalg.svdvals(V.T @ heads.W_V[0] @ heads.W_O[0])[V.shape[1] - 1]
    return spectrum.abs().min() * least / rank, "the symmetric part of W_Q W_K^T is definite"
