"""Settings of an optimizer, or what it holds, that cannot be meant."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm


@alarm(metrics=("settings_contradiction",), title="Settings or state of the optimizer are inconsistent")
def optimizer_settings(layer: LayerState) -> Judgement | None:
    """Gradients are averaged over eight times as many steps as their squares, or a momentum never decays.

    **Exact.** Read from the settings of an optimizer that has made a step with them. Or, from a sample of what it
    holds: the mean of gradients is larger than that of their squares allows, or it is along the weights, as an L2 decay
    is that outweighs the gradients.
    """
    if not layer.has("settings_contradiction"):
        return None
    beyond = layer.now["settings_contradiction"]
    words = f"{beyond:.2g} times beyond the limit" if beyond > 1.0 else "as usual"
    return Judgement(beyond, {"settings_contradiction": beyond}, words)
