"""Inputs: turns what the user passes into the batches on which a model runs."""

from rankscope.models.inputs._prepare import prepare_inputs, prepare_planned
from rankscope.models.inputs.prefixes import prepare_prefixes
from rankscope.models.inputs.record import (
    TOKENS_POLICIES,
    Batch,
    InputPlan,
    Padding,
    Prepared,
    TokensPolicy,
    distinct_in,
    sequences_in_pass,
)

__all__ = [
    "TOKENS_POLICIES",
    "Batch",
    "InputPlan",
    "Padding",
    "Prepared",
    "TokensPolicy",
    "distinct_in",
    "prepare_inputs",
    "prepare_planned",
    "prepare_prefixes",
    "sequences_in_pass",
]
