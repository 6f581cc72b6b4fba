"""Blocks that begin as copies of one block, and units that begin as copies of one unit."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm


@alarm(metrics=("cloned_blocks",), title="Weights begin as copies", confirm=1, is_event=True)
def cloned_blocks(layer: LayerState) -> Judgement | None:
    """**Exact**: before the first step, all matrices of a block equal those of the first one, entry by entry.

    ``nn.TransformerEncoder`` makes such blocks. Blocks that share their parameters are one block, and do not count. Or
    half of the matrices of a block have at most half as many different rows as rows, as constant ones do.
    """
    if (share := layer.now.get("equal_units", 0.0)) > 0.0:
        words = f"in {share:.0%} of the matrices of a block, units are copies of each other"
        return Judgement(2.0, {"equal_units": share}, words)
    if not layer.has("cloned_blocks"):
        return None
    number = layer.now["cloned_blocks"]
    words = f"{number:.0f} blocks have exactly the weights of the first one" if number else "no block is a copy"
    return Judgement(2.0 * number, {"cloned_blocks": number}, words)
