"""Settings of an optimizer that contradict each other."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm


@alarm(metrics=("settings_contradiction",), title="Settings of the optimizer contradict each other")
def optimizer_settings(layer: LayerState) -> Judgement | None:
    """Gradients are averaged over eight times as many steps as their squares, or a momentum never decays.

    **Exact.** Read from the settings of an optimizer that has made a step with them. Or, from a sample of what it
    holds: the mean of gradients is larger than that of their squares allows, or it is along the weights, as an L2 decay
    is that outweighs the gradients.
    """
    if not layer.has("settings_contradiction"):
        return None
    beyond = layer.now["settings_contradiction"]
    words = f"they are {beyond:.2g} times as far from each other as in any usual recipe" if beyond > 1.0 else "as usual"
    return Judgement(beyond, {"settings_contradiction": beyond}, words)
