"""Inputs: from what the user has to the batches a model is run on."""

from rankscope.models.inputs._prepare import prepare_inputs
from rankscope.models.inputs.record import TOKENS_POLICIES, Batch, Prepared, TokensPolicy

__all__ = ["TOKENS_POLICIES", "Batch", "Prepared", "TokensPolicy", "prepare_inputs"]
