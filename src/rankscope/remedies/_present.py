"""Tells whether a model already has what a remedy would add, from the names of the parts of its attention."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from rankscope.errors import UnsupportedOperationError
from rankscope.models.view import ModelView
from rankscope.stream.operators import is_attention, is_norm

QUERY_KEY_NORM = re.compile(r"^(q|k|qk|query|key)(_?layer)?_?norm$")
OUTPUT_NORM = re.compile(r"(attn|attention)?_?(sub_?(layer_?)?norm|sub_?ln|inner_attn_ln|out(put)?_norm|o_norm)$")
CAP = re.compile(r"soft_?cap|logit_?cap")
ROTARY = re.compile(r"rotary|rope(?![a-z])", re.IGNORECASE)


def refuse_norm_in_attention(view: ModelView, names: re.Pattern[str], what: str) -> None:
    """Raise if attention in some block contains a norm module of such a name.

    Raises:
        UnsupportedOperationError: the message names the module.
    """
    for path, part in _attention_parts(view):
        if is_norm(part) and names.search(path.rpartition(".")[2].lower()):
            raise UnsupportedOperationError(f"This model already has {what}: {path} ({type(part).__name__}).")


def refuse_cap(view: ModelView) -> None:
    """Raise if attention in some block holds a number named like a cap of its scores.

    Raises:
        UnsupportedOperationError: the message names the number.
    """
    for path, part in _attention_parts(view):
        for name, value in vars(part).items():
            if CAP.search(name) and isinstance(value, (int, float)) and not isinstance(value, bool):
                raise UnsupportedOperationError(f"This model already caps its scores: {path}.{name} is {value:g}.")


def refuse_rotary(view: ModelView, why: str) -> None:
    """Raise if a module or an option of the model is named like rotary positions.

    Raises:
        UnsupportedOperationError: the message names it.
    """
    config = getattr(view.model, "config", None)
    options = [name for name, value in vars(config).items() if value] if config is not None else []
    parts = [type(module).__name__ for module in view.model.modules()]
    rotary = next((name for name in (*options, *parts) if ROTARY.search(name)), None)
    if rotary is not None:
        raise UnsupportedOperationError(f"This model has rotary positions ({rotary}): {why}")


def _attention_parts(view: ModelView) -> Iterator[tuple[str, nn.Module]]:
    """Every module inside the attention modules of the blocks, with its path in the model."""
    modules = view.modules()
    for stack in view.stacks:
        for block in dict.fromkeys(call.module_name for call in stack.calls):
            for name, module in modules[block].named_modules():
                if is_attention(name, type(module)) and module is not modules[block]:
                    for inner, part in module.named_modules():
                        yield ".".join(filter(None, (block, name, inner))), part
