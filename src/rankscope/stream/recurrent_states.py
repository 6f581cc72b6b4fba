"""Reads the state of recurrent blocks (linear attention, state space models) after the last token.

A block computes its state in a kernel that shows it to nobody, but hands it to the cache for generation. So a pass is
given a cache of transformers' own, which changes no output, and the state is read from it as each block ends.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from torch import Tensor, nn

from rankscope.models.hf import is_hf_config

_CACHE_ARGUMENTS = ("past_key_values", "cache_params")


def _cache_class_beside(model: nn.Module) -> str:
    """Name of a cache class defined in the model's own file (MiniMax), which such a model insists on; empty if none."""
    from transformers import Cache

    file = sys.modules[type(model).__module__]
    classes = (one for one in vars(file).values() if isinstance(one, type) and issubclass(one, Cache))
    return next((one.__name__ for one in classes if one.__module__ == file.__name__), "")


class RecurrentStates:
    """The states of one forward pass.

    Args:
        model: the model that is about to run.
        given: the keyword arguments of the call.

    Attributes:
        refused: why the states of this model cannot be read; empty if they can.
        arguments: keyword arguments that make the model keep them.
    """

    def __init__(self, model: nn.Module, given: dict[str, Any]) -> None:
        self._cache: Any = None
        self.arguments: dict[str, Any] = {}
        self.refused = self._prepare(model, given)

    def _prepare(self, model: nn.Module, given: dict[str, Any]) -> str:
        config: Any = getattr(model, "config", None)
        if not is_hf_config(config):
            return "a state is read from the cache of a transformers model, and this is not one"
        from transformers import DynamicCache, __version__, cache_utils

        recurrent = getattr(cache_utils, "LinearAttentionCacheLayerMixin", None)
        if recurrent is None:
            return f"a state is read from a cache that transformers {__version__} does not have; update it"
        keeps = hasattr(config.get_text_config(decoder=True), "num_hidden_layers")  # what a cache is made from
        cache = DynamicCache(config=config) if keeps else DynamicCache()
        if not any(isinstance(layer, recurrent) for layer in cache.layers):
            return f"{type(model).__name__} keeps no recurrent state in transformers' cache"
        own = _cache_class_beside(model)
        if own:
            return f"{type(model).__name__} keeps its state in a cache of its own ({own}), not in that of transformers"
        taken = [name for name in _CACHE_ARGUMENTS if name in inspect.signature(model.forward).parameters]
        if len(taken) != 1:
            return f"{type(model).__name__} takes no cache as an argument"
        if given.get(taken[0]) is not None:
            return "the inputs bring a cache of their own, so a state would not be that of these tokens alone"
        self._cache = cache
        self.arguments = {taken[0]: cache, "use_cache": True}
        return ""

    def after(self, block: nn.Module, sequences: int) -> Tensor | str | None:
        """State ``batch heads rows columns`` of a block that has just run; a reason if there is none to measure.

        None for a block without recurrence.
        """
        numbers = {number for part in block.modules() if isinstance(number := getattr(part, "layer_idx", None), int)}
        if len(numbers) != 1:
            return f"{type(block).__name__} does not say which entry of the cache is its own"
        layer = self._cache.layers[numbers.pop()]
        states = [state for state in getattr(layer, "recurrent_states", {}).values() if state is not None]
        if not states:
            return None
        if len(states) > 1:
            return f"{type(block).__name__} keeps {len(states)} recurrent states, and not one"
        state: Tensor = states[0]
        if state.dim() not in (3, 4) or state.shape[0] != sequences:
            return (
                f"the state of {type(block).__name__} has the shape {tuple(state.shape)}; expected a matrix, or one "
                f"per head, for each of {sequences} sequences"
            )
        return state if state.dim() == 4 else state.unsqueeze(1)
