"""A batch without content."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm

ONE_TOKEN = 0.9
"""Share of a batch that one token has, at which it is nearly everywhere."""
LEAST_CONTENT = 0.01
"""Share of tokens that are content, below which nothing is left to learn from."""


@alarm(
    metrics=("batch_padding", "batch_ignored"),
    title="The batch is empty",
    to_do="Look at the tokenizer, at what pads a batch, and at what masks its labels.",
)
def padding_only(layer: LayerState) -> Judgement | None:
    """At least 99% of the tokens of the batch are padding, or of its labels ignored; or one token is 90% of the rest.

    **Exact.** If nothing marks padding, the most common token counts as padding.
    """
    known = {name: layer.now[name] for name in ("batch_padding", "batch_ignored") if layer.has(name)}
    if (common := layer.now.get("batch_common", 0.0)) >= ONE_TOKEN:
        return Judgement(common / ONE_TOKEN, {"batch_common": common}, f"one token makes up {common:.0%} of it", "data")
    if not known:
        return None
    worst = max(known, key=lambda name: known[name])
    what = {"batch_padding": "tokens are padding, or one and the same", "batch_ignored": "labels are ignored"}[worst]
    content = 1.0 - known[worst]
    severity = LEAST_CONTENT / content if content > 0.0 else 1.0 / LEAST_CONTENT
    return Judgement(severity, known, f"{known[worst]:.1%} of the {what}", "data")
