"""Evaluates several metrics on one view; each value has a status that says how far it can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rankscope._types import Status
from rankscope.errors import InputError
from rankscope.linalg.attention_view import AttentionView
from rankscope.linalg.branch import Branch
from rankscope.linalg.precision import full_precision
from rankscope.linalg.spectrum import least_with_six_digits
from rankscope.linalg.tokens import Tokens
from rankscope.metrics._sides import View, side_of_view
from rankscope.metrics._spec import MetricSpec

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
"""Medians and counts over pairs of tokens, which a few huge tokens or channels cannot dominate."""

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
    "stream_rms",
)
"""With pairs and both spectra: the metrics that a verdict is based on."""

DEFAULT_ATTENTION_METRICS: tuple[str, ...] = (
    "attention_entropy",
    "first_token_sink_rate",
    "attention_rank_one_distance",
)
"""Sums only; ``attention_contraction`` needs a spectrum per head and is computed only if named."""

DEFAULT_UPDATE_METRICS: tuple[str, ...] = ("write_ratio", "block_influence")
DEFAULT_ROUTER_METRICS: tuple[str, ...] = ("router_entropy", "effective_experts", "largest_expert_share")
"""Sums over tokens; routers are read only in models that have experts."""

_CODE = {status: code for code, status in enumerate(Status)}


@dataclass(frozen=True)
class MetricValues:
    """Values of several metrics, on the device where they were computed; the caller decides when to move them.

    Attributes:
        values: float64; NaN unless the status is ``OK``, ``FLOOR`` or ``ESTIMATE``.
        statuses: index of each value's status in ``list(Status)``.
    """

    values: Float[Tensor, " metrics *batch"]
    statuses: Int[Tensor, " metrics *batch"]


def evaluate(specs: Sequence[MetricSpec], view: View, floor: float) -> MetricValues:
    """Compute every metric of ``specs`` on one view, sharing its reductions.

    Args:
        specs: metrics of the view's side.
        view: a view of what one site shows.
        floor: relative residual below which the dtype of the activations shows only rounding, see ``float_floor``.

    Returns:
        Values with a leading metric axis, then the batch axes (and heads, for attention).

    Raises:
        InputError: a metric of another side.
    """
    side = side_of_view(view).name
    wrong = [spec.name for spec in specs if spec.side != side]
    if wrong:
        raise InputError(
            f"{', '.join(wrong)} cannot be taken of {side}. See each metric's side in `rankscope ls metrics`."
        )
    if not specs:
        empty = view.count.new_empty((0, *view.batch_shape))
        return MetricValues(empty, empty.to(torch.int8))
    # A mode that follows the model would be asked about each of some 600 operations.
    with torch._C.DisableTorchFunction(), full_precision(view.count.device):
        return _evaluated(specs, view, floor)


def _evaluated(specs: Sequence[MetricSpec], view: View, floor: float) -> MetricValues:
    sampled = view.sampled if isinstance(view, Tokens) and view.has_estimated_spectra else view
    values = torch.stack([spec.function(sampled if spec.estimate else view) for spec in specs])
    statuses = _statuses(specs, values, view, floor)
    lost = (statuses == _CODE[Status.UNDEFINED]) | (statuses == _CODE[Status.NOT_FINITE])
    return MetricValues(values.masked_fill_(lost, torch.nan), statuses)


def is_left_out(spec: MetricSpec, view: View) -> bool:
    """Whether a metric needs all singular values of a large view, and those of a sample say nothing about it."""
    return spec.needs == "spectrum" and not spec.estimate and isinstance(view, Tokens) and view.has_estimated_spectra


def _statuses(specs: Sequence[MetricSpec], values: Tensor, view: View, floor: float) -> Tensor:
    """All statuses at once: on an accelerator, a small operation costs as much as a large one."""

    def declared(facts: list[bool]) -> Tensor:
        # From ordinary memory such a copy is staged: the host does not wait for the device.
        return torch.tensor(facts).to(values.device, non_blocking=True).reshape(-1, *(1 for _ in view.batch_shape))

    statuses = torch.full_like(values, _CODE[Status.OK], dtype=torch.int8)
    if isinstance(view, Tokens) and view.has_estimated_spectra:
        estimated = declared([spec.estimate for spec in specs])
        statuses.masked_fill_(estimated, _CODE[Status.ESTIMATE])
    if isinstance(view, Branch):
        statuses.masked_fill_(view.is_span_uncertain.reshape(view.batch_shape), _CODE[Status.ESTIMATE])
    if isinstance(view, (Tokens, AttentionView)):
        floors_itself = declared([spec.floors_itself for spec in specs])
        if isinstance(view, Tokens) and any(spec.floors_itself for spec in specs):
            few_digits = floors_itself & (values < least_with_six_digits(view.dtype))
            statuses.masked_fill_(few_digits, _CODE[Status.ESTIMATE])
        deviation = view.relative_deviation.reshape(view.batch_shape)
        reads_deviation = declared([spec.reads_deviation for spec in specs])
        # Not `deviation <= floor`: X = 0, whose deviation is 0/0, also counts as at the floor.
        at_floor = reads_deviation & ~view.is_resolved(floor).reshape(view.batch_shape)
        # Rounding is relative to X, so a singular value of CX reaches the floor earlier, by the ratio of the two norms.
        at_floor |= floors_itself & (values * torch.where(reads_deviation, deviation, 1.0) <= floor)
        statuses.masked_fill_(at_floor, _CODE[Status.FLOOR])
    statuses.masked_fill_(torch.isnan(values), _CODE[Status.UNDEFINED])
    finite = view.finite.reshape(view.batch_shape)
    return statuses.masked_fill_(~finite | torch.isinf(values), _CODE[Status.NOT_FINITE])
