"""Faults in how the model is put together, which experiments show before the first step."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm


@alarm(metrics=("shown_faults",), title="The model has a fault", confirm=1, is_event=True)
def shown_faults(layer: LayerState) -> Judgement | None:
    """**Exact**: before the first step, an experiment of ``doctor`` on the probe shows a fault of the wiring.

    Such as a softmax over another axis than the keys, sequences that influence each other, a causal mask that is
    missing or off by one, modules that are not registered. What depends on weights is left to training.
    """
    if not layer.has("shown_faults"):
        return None
    number = layer.now["shown_faults"]
    return Judgement(2.0 * number, {"shown_faults": number}, "", "structure")
