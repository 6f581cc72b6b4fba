"""The inputs of theorems: plain numbers of one network, layer by layer, for one sequence."""

from __future__ import annotations

import math
from dataclasses import dataclass

from rankscope.ext.theory.attention_graph import AttentionGraph
from rankscope.ext.theory.contraction import LayerGains
from rankscope.ext.theory.lipschitz import LipschitzConstants

MOST_ROUNDING = 0.5
"""Fraction of a residual that may be rounding before it counts as rounding only."""


@dataclass(frozen=True)
class Network:
    """Properties of the whole network.

    Attributes:
        depth: number of attention layers.
        heads: heads per layer; the largest number if layers differ.
        width: width of the stream.
        pure: nothing but attention: no skip, no MLP, no norm.
        only_mlp: attention and an MLP in every layer, no skip and no norm.
        has_skip: there is a skip around attention.
        row_scaling: every layer ends with scaling tokens to unit length and nothing else is done to them.
        bilinear: scores are query times key and nothing else: no positions in them, no norm of queries or keys.
    """

    depth: int
    heads: int
    width: int
    pure: bool = False
    only_mlp: bool = False
    has_skip: bool = False
    row_scaling: bool = False
    bilinear: bool = True


@dataclass(frozen=True)
class HeadSizes:
    r"""Norms of the weights of one head: of :math:`W_{QK}` (without the scale) and of :math:`W_h = W_VW_O`."""

    score_one: float
    score_spectral: float
    value_one: float
    value_inf: float
    value_spectral: float
    value_least: float

    @property
    def value_composite(self) -> float:
        r""":math:`\|W_h\|_{1,\infty}`."""
        return float((self.value_one * self.value_inf) ** 0.5)


@dataclass(frozen=True)
class StreamState:
    r"""The stream between two layers.

    Attributes:
        norm: :math:`\|X\|_F`.
        mu: :math:`\|CX\|_F`.
        composite: :math:`\|CX\|_{1,\infty}`.
        unit_mu: the same with every token scaled to unit length.
        column_spread: root of the summed squares of the columns' ranges.
        least_cosine: between two tokens.
        farthest: largest distance between two tokens scaled to unit length.
        rank: of X.
    """

    norm: float
    mu: float
    composite: float
    unit_mu: float
    column_spread: float
    least_cosine: float
    rank: int
    farthest: float


@dataclass(frozen=True)
class Passage:
    r"""One sequence through one attention layer.

    Attributes:
        tokens: how many count.
        composite_in: :math:`\|R\|_{1,\infty}` of the input of attention, about the mean.
        composite_out: the same for the output of attention, as the model computed it; NaN if that was not seen.
        frobenius_in: :math:`\|R\|_F` of the input of attention.
        frobenius_out: the same for the output of attention, as the model computed it; NaN if that was not seen.
        spread: per head :math:`\max_iD_{ii}`.
        spread_total: per head :math:`\sum_iD_{ii}`.
        score_one: per head :math:`\|E\|_1`.
        graph: which tokens reach which.
        least_edge: the smallest attention on an edge, over heads; 0 if it underflows.
        least_entropy: per head the smallest entropy of a row that sees two tokens or more.
        entropy_tokens: per head how many tokens that row sees.
        logit_size: per head a bound on the norm of that row's logits, from weights and tokens.
        stream_in: the stream before the layer.
        stream_out: the stream after the layer.
        gains: gains of the attention branch.
        log_cubic: lower and upper bound of the cubic law on the log of the residual after attention; None with
            positions in the scores or a mask.
        sum_gains: gains of stream plus branch, if attention reads the stream itself.
        sum_out: :math:`\|R\|_F` of stream plus branch, as the model computed it; NaN if ``sum_gains`` is None.
        at_floor: the residual before or after attention is only rounding.
        rounding: relative error of the residual after attention due to the float format, including that of the scores.
        sum_rounding: the same for stream plus branch.
        heads_gap: relative difference between the residual that the model computed and that which attention, values and
            outputs give.
        row_gap: how far a row sum of attention is from one.
        outside: the largest share of a row that goes to tokens that do not count (padding).
        score_gap: how far attention is from the softmax of scale times query times key, entry by entry.
        score_rounding: how much the rounding of the scores may change it.
        logit_spread: per head a lower bound on the norm of the logits of the row of ``least_entropy``, read off
            attention itself.
        alone_gap: relative difference between the output of the block and attention of the stream alone.
        sphere_gap: difference between its output and attention of the stream with all tokens scaled to unit length; the
            stream before it counts too.
        bias: norm of what value and output biases add to each token.
        unit: the rounding of the model's dtype, with which the gaps are compared.
        entropy_floor: entropy at and below which a row is one-hot up to rounding.
        stream_at_floor: the differences between tokens of the stream after the layer are only rounding.
    """

    tokens: int
    composite_in: float
    composite_out: float
    frobenius_in: float
    frobenius_out: float
    spread: tuple[float, ...]
    spread_total: tuple[float, ...]
    score_one: tuple[float, ...]
    graph: AttentionGraph
    least_edge: float
    least_entropy: tuple[float, ...]
    entropy_tokens: tuple[int, ...]
    logit_size: tuple[float, ...]
    stream_in: StreamState
    stream_out: StreamState
    gains: LayerGains
    log_cubic: tuple[float, float] | None = None
    sum_gains: LayerGains | None = None
    sum_out: float = math.nan
    at_floor: bool = False
    rounding: float = 0.0
    sum_rounding: float = 0.0
    heads_gap: float = 0.0
    row_gap: float = 0.0
    outside: float = 0.0
    score_gap: float = 0.0
    score_rounding: float = 0.0
    logit_spread: tuple[float, ...] = ()
    alone_gap: float = 0.0
    sphere_gap: float = 0.0
    bias: float = 0.0
    unit: float = 0.0
    entropy_floor: float = 0.0
    stream_at_floor: bool = False

    @property
    def log_rounding(self) -> float:
        """How much rounding may have changed the logarithm of the residual after attention."""
        return log_of_rounding(self.rounding)


def log_of_rounding(relative: float) -> float:
    """How much a relative error may have changed a logarithm, in either direction; infinite from 1 on.

    Example:
        >>> log_of_rounding(0.0), round(math.exp(-log_of_rounding(0.25)), 12)
        (0.0, 0.75)
    """
    return -math.log1p(-relative) if relative < 1 else math.inf


@dataclass(frozen=True)
class LayerQuantities:
    """One layer: the norms of its weights, and one sequence's passage through it.

    Attributes:
        layer: number of the block.
        passage: what one sequence did there.
        heads: norms per head.
        scale: factor on query times key.
        mlp: certified Lipschitz constant of the MLP that follows; None if it was not read.
        mlp_note: why the MLP was not read.
    """

    layer: int
    passage: Passage
    heads: tuple[HeadSizes, ...]
    scale: float
    mlp: LipschitzConstants | None = None
    mlp_note: str = ""

    @property
    def beta(self) -> float:
        r""":math:`\max_h\|W_{QK,h}\|_1\|W_h\|_{1,\infty}`."""
        return max(head.score_one * head.value_composite for head in self.heads)
