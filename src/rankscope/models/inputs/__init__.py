"""Inputs: turns what the user passes into the batches on which a model runs."""

from rankscope.models.inputs._prepare import prepare_inputs, prepare_planned
from rankscope.models.inputs.given import digest_of, need_same_inputs
from rankscope.models.inputs.inputs import Given, Inputs, InputsLike, as_inputs
from rankscope.models.inputs.record import (
    AXES,
    Axes,
    Batch,
    InputPlan,
    Padding,
    Prepared,
    TokensPolicy,
    distinct_in,
    sequences_in_pass,
)

__all__ = [
    "AXES",
    "Axes",
    "Batch",
    "Given",
    "InputPlan",
    "Inputs",
    "InputsLike",
    "Padding",
    "Prepared",
    "TokensPolicy",
    "as_inputs",
    "digest_of",
    "distinct_in",
    "need_same_inputs",
    "prepare_inputs",
    "prepare_planned",
    "sequences_in_pass",
]
