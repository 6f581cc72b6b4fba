"""The one warning that compares with the past of the run: a loss that jumps and stays up."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm


@alarm(metrics=("loss_risen",), title="The loss stays above all of its past", confirm=1, is_event=True)
def loss_rises(layer: LayerState) -> Judgement | None:
    """The loss jumped, in its own noise, and has stayed above all of its past for 64 steps.

    **Heuristic.** Severity is the distance from the largest loss of the four steps before to the least of the first
    four, divided by the larger of 8% of the level before and two standard deviations of the loss of a step; 1 at least
    if something that nobody declared was written down in the 32 steps before the onset. A loss below a quarter of that
    of the first readings is none, nor one that rises slowly, as in adversarial training.
    """
    if not layer.has("loss_risen", "loss_before", "loss_after"):
        return None
    severity, before, after = (layer.now[name] for name in ("loss_risen", "loss_before", "loss_after"))
    since = layer.now.get("loss_since", 0.0)
    evidence = {"loss_risen": severity, "loss_before": before, "loss_after": after, "since": since}
    return Judgement(0.0 if layer.converged else severity, evidence, f"{after:.3g}, and {before:.3g} before")
