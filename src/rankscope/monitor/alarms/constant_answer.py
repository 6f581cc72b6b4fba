"""Answers that do not depend on the inputs, while the loss does not fall."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Judgement, LayerState, alarm

PATIENCE = 128.0
"""Steps for which it has to last."""


@alarm(
    metrics=("answers_alike", "answers_loss", "mean_answer_loss"),
    title="The model predicts no better than a constant",
    confirm=1,
)
def constant_answer(layer: LayerState) -> Judgement | None:
    """The loss is stuck where one answer for all inputs would leave it, such as the logarithm of the number of classes.

    **Heuristic.** Severity is the number of steps for which the loss of the answers was at least 99% of that of their
    mean, given for all inputs, while the loss fell by less than 1% and the learning rate did not rise; divided by 128.
    """
    if not layer.has("answers_alike", "answers_loss", "mean_answer_loss"):
        return None
    evidence = {name: layer.now[name] for name in ("answers_alike", "answers_loss", "mean_answer_loss")}
    steps, own, mean = evidence.values()
    words = f"for {steps:.0f} steps, with a loss of {own:.3g}, and {mean:.3g} for their mean instead of each of them"
    if layer.now.get("answers_crossed", 0.0) > 0.0:
        words = f"{words}; each answer is compared with the targets of all inputs: their shapes are broadcast"
        return Judgement(steps / PATIENCE, evidence, words, "objective")
    return Judgement(steps / PATIENCE, evidence, words)
