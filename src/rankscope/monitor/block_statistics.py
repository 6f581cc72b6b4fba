"""Reads every training forward by ``rankscope.blockstats``: no extra pass, the training batches, compiled or not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from rankscope import blockstats
from rankscope._types import Status
from rankscope.errors import InputError, UnsupportedOperationError
from rankscope.models.view import ModelView
from rankscope.models.wrapping import unwrapped
from rankscope.monitor.probing import Prober
from rankscope.monitor.readings import LayerValue

GRAPH_METRICS = ("relative_residual", "stream_rms")
"""The block statistics that are also metrics."""


def _batch_first(args: Any, kwargs: Any, output: Any) -> tuple[Tensor, Tensor]:
    x = output if isinstance(output, Tensor) else output[0]
    return x, x  # what the block adds is not read


def _tokens_first(args: Any, kwargs: Any, output: Any) -> tuple[Tensor, Tensor]:
    x, _ = _batch_first(args, kwargs, output)
    return x.transpose(0, 1), x.transpose(0, 1)


class GraphReader:
    """Block statistics of all training forwards between two readings; every token counts, padding too.

    Each block has statistics of its own, so that one that did not run is missing and the others are read. The hooks
    stay on the model until :meth:`close`.

    Args:
        prober: knows the model and its structure. It runs the probe once, for the widths of the streams.

    Raises:
        UnsupportedOperationError: the blocks of this model cannot be read in this way.
    """

    def __init__(self, prober: Prober) -> None:
        view, _, _ = prober.set_up()
        refuse_in_graph(view)
        modules = view.modules()
        blocks = [(stack, call, unwrapped(modules[call.module_name])) for stack in view.stacks for call in stack.calls]
        widths: dict[nn.Module, int] = {}

        def note_width(block: nn.Module, args: Any, output: Any) -> None:
            widths[block] = _batch_first(args, {}, output)[0].shape[-1]

        with ExitStack() as hooks:
            for _, _, block in blocks:
                hooks.callback(block.register_forward_hook(note_width).remove)
            prober.look()
        self._blocks = []
        for stack, call, block in blocks:
            stream = _tokens_first if stack.layout == "tokens batch dim" else _batch_first
            stats = blockstats.attach([block], widths[block], stream=stream)
            stats.count()
            self._blocks.append((stack.name, call.first_layer, stats))

    def take(self) -> tuple[LayerValue, ...]:
        """The values of all training forwards since the last call.

        Raises:
            UnsupportedOperationError: there were none, or they ran without the hooks.
        """
        found = [row for stack, layer, stats in self._blocks for row in _rows(stack, layer, _flushed(stats))]
        if not found:
            raise UnsupportedOperationError(
                "No training forward was seen since the last reading. A compiled model must be compiled after the "
                "gauge is created: create the gauge before the first step, or call torch._dynamo.reset(). Forwards in "
                "evaluation mode are not read."
            )
        return tuple(found)

    def close(self) -> None:
        """Remove the hooks."""
        for _, _, stats in self._blocks:
            stats.detach()


def _flushed(stats: blockstats.BlockStats) -> Mapping[str, float]:
    """What one block added up on this rank; empty if it did not run, for which `flush` would raise."""
    return stats.flush(group=False) if stats.taps[0].totals.any() else {}


def _rows(stack: str | None, layer: int, values: Mapping[str, float]) -> Iterator[LayerValue]:
    for metric in GRAPH_METRICS if values else ():
        value, status = values[f"{metric}/0"], Status.OK
        if not values["tokens/0"]:
            status = Status.NOT_FINITE
        elif metric == "relative_residual" and values["group_tokens/0"] < 2:
            value, status = math.nan, Status.UNDEFINED
        yield LayerValue(metric, "block.out", stack, layer, value, value, value, str(status))


def refuse_in_graph(view: ModelView) -> None:
    """Check that each block is one module that runs once in a forward pass and returns the stream first.

    Raises:
        UnsupportedOperationError: this is not so.
    """
    names = [call.module_name for stack in view.stacks for call in stack.calls]
    why = None
    if any(not stack.stream.is_plain for stack in view.stacks):
        why = "the residual stream is not the first tensor that a block returns"
    elif len(set(names)) < len(names):
        why = "several layers share one module"
    elif any(len(call.blocks) > 1 for stack in view.stacks for call in stack.calls):
        why = "its blocks are not modules"
    if why is not None:
        raise UnsupportedOperationError(f"where='graph' cannot read this model: {why}. Use where='probe'.")


def graph_metrics(names: Sequence[str] | None) -> Sequence[str]:
    """The metrics of ``where="graph"``.

    Raises:
        InputError: another one was asked for.
    """
    others = [name for name in names or () if name not in GRAPH_METRICS]
    if others:
        raise InputError(
            f"where='graph' reads {' and '.join(GRAPH_METRICS)} only, not {', '.join(others)}: everything else needs "
            "attention or a spectrum. Use where='probe' for these, or two gauges."
        )
    return GRAPH_METRICS if names is None else names
