"""Before a streamed run: the blocks are found, the budget is held against an estimate, and the rest is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rankscope._errors import RankscopeError, UnsupportedConfigError
from rankscope.execution.offload.budget import Need, keeps_streams_in_memory, resident_bytes
from rankscope.execution.offload.meta_model import Skeleton
from rankscope.execution.offload.outside import read_rest, rest_bytes
from rankscope.execution.offload.schedule import Terms, Walk
from rankscope.execution.offload.weights import slots_of_blocks
from rankscope.execution.offload.work_folder import content_key
from rankscope.execution.offload.zeros import standing_in
from rankscope.models.inputs import Batch, Prepared
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.stream import Stream
from rankscope.models.view import ModelView, Stack
from rankscope.stream.viewing import view_of

_STILL_TO_COME = 100 * 2**20
"""What libraries take that are first used when a block is measured, and what the allocator does not give back."""


def plan_walk(
    skeleton: Skeleton,
    prepared: Prepared,
    terms: Terms,
    *,
    options: Mapping[str, Any],
    blocks: str | Sequence[str] | None = None,
    stream: Stream | None = None,
    lanes: int = 1,
    widened: bool = False,
) -> Walk:
    """Find the blocks, read what is outside them, and see whether the budget has room.

    Args:
        skeleton: the model.
        prepared: its inputs.
        terms: what the user allowed.
        options: everything else that decides the values, for the key of the run.
        blocks: names or patterns of the block modules, where discovery needs help.
        stream: where the residual stream is, where it was declared.
        lanes: how many networks run side by side.
        widened: whether a block's weights are also held in float64.

    Raises:
        UnsupportedConfigError: the model is not one plain row of blocks.
        InputError: the budget has no room for one block.
    """
    view = _seen(skeleton, prepared, blocks, stream)
    stack = _only_stack(view)
    names = list(dict.fromkeys(call.module_name for call in stack.calls))
    largest = max(sum(s.nbytes for s in slots) for slots in slots_of_blocks(skeleton, names).values())
    need = _need(skeleton, prepared, names, largest, lanes=lanes, widened=widened)
    in_memory = keeps_streams_in_memory(need, terms.memory)
    read_rest(skeleton, names, prepared)
    key = content_key(skeleton.paths, prepared, {**options, "config": skeleton.loaded.config_hash})
    return Walk(skeleton, prepared, view, need, in_memory, terms, key)


def _seen(
    skeleton: Skeleton, prepared: Prepared, blocks: str | Sequence[str] | None, stream: Stream | None
) -> ModelView:
    """The structure of the model, from a pass with zeros for its weights."""
    model = skeleton.loaded.model
    try:
        with standing_in(skeleton.slots), quiet_transformers():
            return view_of(model, prepared[0], blocks=blocks, stream=stream)
    except RankscopeError:
        raise
    except Exception as error:
        raise UnsupportedConfigError(
            f"{type(model).__name__} cannot be run without its weights, to see how it is built: "
            f"{type(error).__name__}: {error}. Leave offload out."
        ) from error


def _only_stack(view: ModelView) -> Stack:
    """The stack of a model that can be walked, block by block.

    Raises:
        UnsupportedConfigError: there are several, or blocks that are no modules of their own.
    """
    name = type(view.model).__name__
    if len(view.stacks) > 1:
        found = ", ".join(str(stack.name) for stack in view.stacks)
        raise UnsupportedConfigError(
            f"{name} has several stacks ({found}), and one is to be offloaded at a time. Leave offload out; for a "
            "model larger than memory use load(spec, device_map=...)."
        )
    stack = view.stacks[0]
    if len(stack.calls) < 2 or any(len(call.blocks) != 1 or call.final_norm_inside for call in stack.calls):
        raise UnsupportedConfigError(
            f"The blocks of {name} are no modules of their own, so that none can be run without the others. Name the "
            "block modules with blocks='layers.*', or leave offload out."
        )
    return stack


def _need(
    skeleton: Skeleton, prepared: Prepared, names: Sequence[str], largest: int, *, lanes: int, widened: bool
) -> Need:
    """From shapes alone: the widest matrices and the attention of one batch, in and out, and float64 beside them."""
    config = skeleton.loaded.config
    assert config is not None
    text = config.get_text_config().to_dict()
    inside = [slot for slot in skeleton.slots.values() if any(slot.name.startswith(f"{name}.") for name in names)]
    widest = max((max(slot.parameter.shape, default=1) for slot in inside), default=1)
    width = _number(text, ("hidden_size", "n_embd", "d_model"), widest)
    heads = _number(text, ("num_attention_heads", "n_head"), 1)
    own = max(slot.parameter.dtype.itemsize for slot in inside)
    size = 8 if widened else own
    rows = [_rows(part) for part in prepared]
    states = sum(sequences * tokens for sequences, tokens in rows) * width * size * lanes
    sequences, tokens = max(rows, key=lambda shape: shape[0] * shape[1] ** 2)
    work = sequences * tokens * (4 * widest * size + 6 * width * 8) + sequences * heads * tokens**2 * (2 * size + 3 * 8)
    process = resident_bytes() + _STILL_TO_COME + rest_bytes(skeleton, names, prepared)
    return Need(process, largest, largest * 8 // own if widened else 0, work, 2 * states)


def _number(facts: Mapping[str, Any], names: Sequence[str], otherwise: int) -> int:
    """The first of these entries that is one number."""
    return next((facts[name] for name in names if isinstance(facts.get(name), int)), otherwise)


def _rows(part: Batch) -> tuple[int, int]:
    tensors = [value for value in (*part.inputs.values(), *part.arguments) if isinstance(value, Tensor)]
    longest = max((value.shape[1] for value in tensors if value.dim() > 1), default=1)
    return part.sequences, int(longest)
