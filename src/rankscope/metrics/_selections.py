"""Which metrics a run takes when none are named."""

from __future__ import annotations

NORM_METRICS: tuple[str, ...] = (
    "relative_residual",
    "relative_composite_residual",
    "mu",
    "mean_cosine",
    "centred_mean_cosine",
    "correlation",
    "largest_token_share",
    "largest_channel_share",
)
"""Sums only: cheap enough for every block of every pass."""

PAIR_METRICS: tuple[str, ...] = (
    "typical_residual",
    "direction_residual",
    "largest_cluster_share",
    "copied_token_share",
    "distinct_tokens",
)
"""Medians and counts over pairs of tokens: what a few huge tokens or channels cannot hide."""

DEFAULT_TOKEN_METRICS: tuple[str, ...] = (
    *NORM_METRICS,
    *PAIR_METRICS,
    "stable_rank",
    "centred_stable_rank",
    "effective_rank",
    "centred_effective_rank",
    "participation_ratio",
    "centred_participation_ratio",
    "energy_rank_99",
    "centred_energy_rank_99",
    "least_singular_value",
    "centred_least_singular_value",
)
"""With pairs and both spectra: what a verdict is drawn from."""

DEFAULT_ATTENTION_METRICS: tuple[str, ...] = (
    "attention_entropy",
    "first_token_sink_rate",
    "attention_rank_one_distance",
)
"""Sums only; ``attention_contraction`` needs a spectrum per head and is taken when named."""
