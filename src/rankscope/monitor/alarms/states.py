"""States of the model, by the thresholds of every verdict: collapsed, one-hot, without gradients, constant."""

from __future__ import annotations

import math

from rankscope._citations import Cite
from rankscope.monitor.alarms._spec import Breach, LayerState, alarm
from rankscope.verdicts.states import (
    AVERAGING,
    COLLAPSED_RESIDUAL,
    DOMINANT_SHARE,
    ONE_HOT_ENTROPY,
    UNIFORM_ENTROPY,
)

DEEP = 8.0
"""Times below the threshold of a collapse, at which no healthy run was seen."""
PASSING = 1000
"""Steps for which a milder collapse has to last. While a model learns how frequent each token is, a common vector
dominates, and tokens look alike, also in healthy runs: a GPT-2 of width 16 for 170 steps. How long that lasts depends
on the model, so that the number is generous; the gradient of the whole model tells such a phase from a state that stays
(``settled``)."""
INPUTS_APART = 0.1
"""Relative residual between inputs, above which tokens that agree at a low loss are not a fault."""
NOTHING = 1e-7
"""Ratio that rounding alone leaves of gradients that are exactly zero."""
PATIENCE = 128
"""Steps for which predictions have to be no better than a constant."""


@alarm(metrics=("relative_residual",), title="Tokens collapse", cites=(Cite("dong2021attention"),))
def token_collapse(layer: LayerState) -> Breach | None:
    """The tokens have collapsed as ``measure`` would say.

    **Heuristic**: a relative residual of at most 0.03, the threshold of every verb
    (:data:`rankscope.verdicts.states.COLLAPSED_RESIDUAL`). Healthy trainings pass through mild collapses in their first
    steps, so that one above an eighth of that has to last, unless the gradients have vanished.
    """
    if {"relative_residual", "largest_token_share"} <= layer.undefined:
        # Only a zero stream has no largest token.
        return Breach({"relative_residual": math.nan}, "the stream is exactly zero")
    if not layer.has("relative_residual"):
        return None
    now, start = layer.now["relative_residual"], layer.start("relative_residual")
    # As in a verdict, a residual that one constant channel makes small is a collapse only if typical pairs agree.
    apart = max(now, layer.now.get("typical_residual", now))
    # A classifier that pools its tokens: they agree with each other, and inputs do not.
    is_pooled = layer.converged and layer.now.get("inputs_relative_residual", 0.0) >= INPUTS_APART
    if apart > COLLAPSED_RESIDUAL or is_pooled:
        return None
    unsure = not layer.has("typical_residual") and layer.now.get("largest_channel_share", 0.0) > DOMINANT_SHARE
    caution = "; one channel dominates: add typical_residual to the metrics to see the others" if unsure else ""
    passes = DEEP * apart > COLLAPSED_RESIDUAL and (layer.converged or not layer.settled)
    words = f"relative residual {now:.2g} (start of the run {start:.2g}){caution}"
    return Breach({"relative_residual": now, "at_start": start}, words, lasting=PASSING if passes else 0)


@alarm(metrics=("inputs_relative_residual",), title="Inputs collapse", cites=(Cite("chen2021simsiam"),))
def input_collapse(layer: LayerState) -> Breach | None:
    """The pooled inputs have collapsed as ``measure`` would say.

    **Heuristic**: a relative residual of at most 0.03 between the inputs of the probe, each the mean of its tokens,
    that averaging over many tokens does not explain. Needs a probe of at least eight different inputs. A mild collapse
    has to last, as that of tokens has; so has one of inputs that were alike in each of the first readings, as with a
    token embedding that begins small beside the positions.
    """
    if not layer.has("inputs_relative_residual"):
        return None
    now, start = layer.now["inputs_relative_residual"], layer.start("inputs_relative_residual")
    averaging = layer.now.get("inputs_averaging_residual", math.nan)
    if now > COLLAPSED_RESIDUAL or now >= AVERAGING * averaging:
        return None
    began_so = max(layer.first.get("inputs_relative_residual", (math.inf,))) <= COLLAPSED_RESIDUAL
    passes = began_so or (DEEP * now > COLLAPSED_RESIDUAL and not layer.settled)
    evidence = {"inputs_relative_residual": now, "at_start": start, "averaging": averaging}
    words = f"relative residual between inputs {now:.2g} (start of the run {start:.2g})"
    return Breach(evidence, words, lasting=PASSING if passes else 0)


@alarm(
    metrics=("attention_entropy",),
    title="Attention is one-hot or uniform",
    cites=(Cite("zhai2023stabilizing"),),
    is_note=True,
)
def entropy_collapse(layer: LayerState) -> Breach | None:
    """The mean attention entropy of a layer is that of one-hot or uniform attention, as ``measure`` would say.

    **Heuristic**: 0.02 and 0.999 of the largest possible. Attention that copies a token is one-hot in healthy models,
    and small initial weights make it uniform for a while, so that this is written down, once it lasts, and raises no
    alarm.
    """
    now = layer.now.get("attention_entropy", math.nan)
    kinds = {"one-hot": now <= ONE_HOT_ENTROPY, "uniform": now >= UNIFORM_ENTROPY}
    kind = next((kind for kind, is_so in kinds.items() if is_so), None)
    if kind is None:
        return None
    words = f"attention is {kind}, its entropy is {now:.3g} of the largest possible"
    return Breach({"attention_entropy": now}, words, lasting=PASSING if kind == "uniform" else 0)


@alarm(
    metrics=("qk_to_v_gradient",),
    title="Query and key gradients vanish",
    readings=3,
    cites=(Cite("noci2022signal"),),
)
def vanishing_qk_gradients(layer: LayerState) -> Breach | None:
    """Queries and keys get no gradient, while values do: equal tokens, one key for each, or scores that are not read.

    **Exact** up to rounding, in three readings in a row.
    """
    now, start = layer.now.get("qk_to_v_gradient", math.nan), layer.start("qk_to_v_gradient")
    if not now < NOTHING or not layer.now.get("v_gradient", 0.0) > 0.0:
        return None
    entropy = layer.now.get("attention_entropy", math.nan)
    seen = f", and the entropy of attention {entropy:.2g}" if math.isfinite(entropy) else ""
    words = f"query and key gradients are {now:.2g} of the value gradient (start of the run {start:.2g}){seen}"
    return Breach({"qk_to_v_gradient": now, "at_start": start}, words, "attention")


@alarm(
    metrics=("answers_alike", "answers_loss", "mean_answer_loss"),
    title="The model predicts no better than a constant",
    readings=1,
)
def constant_answer(layer: LayerState) -> Breach | None:
    """The loss is stuck where one answer for all inputs would leave it, such as the logarithm of the number of classes.

    **Heuristic**: for 128 steps, the loss of the answers was at least 99% of that of their mean, given for all inputs,
    while the loss fell by less than 1% and the learning rate did not rise.
    """
    names = ("answers_alike", "answers_loss", "mean_answer_loss")
    if not layer.has(*names) or layer.now["answers_alike"] < PATIENCE:
        return None
    evidence = {name: layer.now[name] for name in names}
    steps, own, mean = evidence.values()
    words = f"for {steps:.0f} steps, with a loss of {own:.3g}, and {mean:.3g} for their mean instead of each of them"
    if layer.now.get("answers_crossed", 0.0) > 0.0:
        words = f"{words}; each answer is compared with the targets of all inputs: their shapes are broadcast"
        return Breach(evidence, words, "objective")
    return Breach(evidence, words)
