"""What holds in every correct step, and does not: numbers, gradients, weights, the batch, the loss."""

from __future__ import annotations

from rankscope.monitor.alarms._spec import Breach, LayerState, alarm

CARRIED = 0.03
"""Share of a gradient that was that of the step before."""
LOST = 0.5
"""Share of the entries of gradients that are rounded to zero. With a loss scale that fits, it is a few in a hundred."""
MOVED = 0.05
"""Share of the entries of the blocks' matrices below which weights count as still."""
STILL = 16
"""Steps without motion that are an alarm: a warm-up from zero and the steps that a loss scaler skips are fewer."""
NOTHING_LEFT, ONE_TOKEN = 0.99, 0.9
"""Share of a batch that is padding or has ignored labels, at which nothing is left to learn from; and of one token."""
STUCK, SORTED = 3, 6
"""Readings whose batch equals the one before, and batches in a row that have a single class each."""

_NOT_FINITE = {
    "weights_not_finite": "weights are not finite",
    "loss_not_finite": "the loss is not finite",
    "not_finite": "the stream is not finite in {:.0%} of the sequences",
    "batch_not_finite": "{:.2g} of the entries of the batch are NaN or infinite",
}


@alarm(metrics=(*_NOT_FINITE, "relative_residual"), title="NaN or infinity", readings=1)
def not_finite(layer: LayerState) -> Breach | None:
    """A weight, an activation of the probe, or the loss is NaN or infinite. **Exact**; the first reading counts."""
    bad = {name: layer.now[name] for name in _NOT_FINITE if layer.has(name) and layer.now[name] > 0.0}
    words = " and ".join(_NOT_FINITE[name].format(value) for name, value in bad.items())
    return Breach(bad, words) if bad else None


@alarm(
    metrics=("gradients_not_finite",),
    title="Gradients are NaN or infinite",
    readings=3,
    to_do="If a loss scaler skips these steps, nothing is learned: look at its scale.",
)
def not_finite_gradients(layer: LayerState) -> Breach | None:
    """Gradients are not finite in three readings in a row, while weights still are.

    **Exact.** One such step is normal with a loss scaler, which skips it and lowers its scale. If the optimizer used
    the gradients, the weights are no longer finite, which is an alarm of its own.
    """
    number = layer.now.get("gradients_not_finite", 0.0)
    words = f"gradients of {number:.0f} parameters are not finite"
    return Breach({"gradients_not_finite": number}, words, "gradients") if number > 0.0 else None


@alarm(metrics=("gradient_underflow",), title="Gradients underflow", readings=3)
def gradient_underflow(layer: LayerState) -> Breach | None:
    """Half of the entries of the gradients are rounded to zero, in three readings in a row.

    **Estimate**; see :func:`rankscope.monitor.underflow.lost_to_underflow` for which zeros count. Not at a loss below a
    quarter of its start, where little is left of gradients.
    """
    share, spacing = (layer.now.get(name, 0.0) for name in ("gradient_underflow", "gradient_spacing"))
    if not share >= LOST or layer.converged:
        return None
    words = f"{share:.0%} of the entries of the gradients are rounded to zero"
    words = f"{words}, and the others are small multiples of {spacing:.2g}" if spacing else words
    return Breach({"gradient_underflow": share}, words, "gradients")


@alarm(metrics=("gradient_carried",), title="Gradients are not cleared")
def kept_gradients(layer: LayerState) -> Breach | None:
    """The gradient of a step is a sum of what backward added and of the one before, by 3% or more.

    **Exact** for one small parameter and the step after a reading; gradients that are accumulated over several
    backward passes of one step are not kept ones. Not judged with several processes or a compiled model.
    """
    share = layer.now.get("gradient_carried", 0.0)
    if not share >= CARRIED:
        return None
    words = f"{share:.0%} of a gradient is the one before it"
    words = f"{words}: the optimizer makes two steps for one backward pass" if share == 1.0 else words
    return Breach({"gradient_carried": share}, words, "gradients")


@alarm(metrics=("still_steps", "zero_steps"), title="Weights do not move", readings=1)
def still_weights(layer: LayerState) -> Breach | None:
    """Fewer than 5% of the weights that should learn changed at all over sixteen steps, or all gradients are zero.

    **Exact** for a sample of the entries of each parameter that requires a gradient. Not reported at a loss below a
    quarter of its start, where training may be done and a margin may be kept by all inputs.
    """
    zero, steps = (layer.now.get(name, 0.0) for name in ("zero_steps", "still_steps"))
    if layer.converged or not (zero >= STILL or steps >= STILL):
        return None
    if zero >= STILL:
        words = f"the gradient of every parameter is exactly zero, for {zero:.0f} steps"
        return Breach({"zero_steps": zero}, words, "gradients")
    moved, rate = layer.now["weights_moved"], layer.now.get("learning_rate")
    # Of this block; else how many blocks have any, that of a model without blocks, and how many parameters have one at
    # all. None if no gradient was read.
    names = ("gradient_norm", "blocks_with_gradient", "total_gradient_norm", "parameters_with_gradient")
    gradient = next((layer.now[name] for name in names if layer.has(name)), None)
    words = f"{moved:.1%} of the weights changed since the last reading, and hardly any for {steps:.0f} steps"
    component = "numbers" if moved > 0.0 else "optimizer"
    if rate == 0.0:
        words, component = f"{words}; the learning rate is 0", "rate"
    elif gradient == 0.0:
        words, component = f"{words}; they have no gradient", "gradients"
    elif (held := layer.now.get("weights_held", 1.0)) < 1.0:
        words, component = f"{words}; the optimizer holds {held:.0%} of these parameters at a rate above 0", "optimizer"
    elif rate is not None:
        words = f"{words}; the learning rate is {rate:.2g}"
    return Breach({"still_steps": steps, "weights_moved": moved}, words, component)


@alarm(
    metrics=("batch_padding", "batch_ignored"),
    title="The batch is empty",
    to_do="Look at the tokenizer, at what pads a batch, and at what masks its labels.",
)
def padding_only(layer: LayerState) -> Breach | None:
    """At least 99% of the tokens of the batch are padding, or of its labels ignored; or one token is 90% of the rest.

    **Exact.** If nothing marks padding, the most common token counts as padding.
    """
    for name, limit, words in (
        ("batch_common", ONE_TOKEN, "one token makes up {:.0%} of it"),
        ("batch_padding", NOTHING_LEFT, "{:.1%} of the tokens are padding, or one and the same"),
        ("batch_ignored", NOTHING_LEFT, "{:.1%} of the labels are ignored"),
    ):
        if (share := layer.now.get(name, 0.0)) >= limit:
            return Breach({name: share}, words.format(share), "data")
    return None


@alarm(
    metrics=("batch_copies", "batch_stuck"),
    title="The batch repeats itself",
    to_do="Look at the sampler and at what collates a batch.",
)
def repeated_sequences(layer: LayerState) -> Breach | None:
    """All sequences of the batch are the same, or all batches are.

    **Exact.** The batch has to be the same in four readings in a row, after eight in which
    it was not; a run that has a single batch from the start is not reported. Also if nine tenths of each of six batches
    in a row have one label, and not the same one in all; and if 99.9% of the squared size of the inputs are one feature
    whose standard deviation is at most a twentieth of its mean.
    """
    for name, limit, words in (
        ("batch_one_class", SORTED, "each of {:.0f} batches in a row has a single class"),
        ("batch_feature", 0.0, "feature {:.0f} has 99.9% of the size of the inputs, and is nearly constant"),
        ("batch_stuck", STUCK, "the batch is the same as in each of the {:.0f} readings before"),
        ("batch_copies", 1.0, "{:.0%} of the sequences are copies of another one of the batch"),
    ):
        if (value := layer.now.get(name, -1.0)) >= limit:
            return Breach({name: value}, words.format(value), "data")
    return None


@alarm(metrics=("shown_faults",), title="The model has a fault", readings=1, is_event=True)
def shown_faults(layer: LayerState) -> Breach | None:
    """**Exact**: before the first step, an experiment of ``doctor`` on the probe shows a fault of the wiring.

    Such as a softmax over another axis than the keys, sequences that influence each other, a causal mask that is
    missing or off by one, modules that are not registered. What depends on weights is left to training.
    """
    number = layer.now.get("shown_faults", 0.0)
    return Breach({"shown_faults": number}, "", "structure") if number > 0.0 else None


@alarm(metrics=("loss_risen",), title="The loss stays above all of its past", readings=1, is_event=True)
def loss_rises(layer: LayerState) -> Breach | None:
    """The loss jumped, in its own noise, and has stayed above all of its past for 64 steps.

    **Heuristic.** ``loss_risen`` is the distance from the largest loss of the four steps before to the least of the
    first four, divided by the larger of 8% of the level before and two standard deviations of the loss of a step; 1 at
    least if something that nobody declared was written down in the 32 steps before the onset. A loss below a quarter of
    that of the first readings is none, nor one that rises slowly, as in adversarial training.
    """
    names = ("loss_risen", "loss_before", "loss_after", "loss_since")
    if not layer.has(*names) or layer.now["loss_risen"] < 1.0 or layer.converged:
        return None
    risen, before, after, since = (layer.now[name] for name in names)
    evidence = {"loss_risen": risen, "loss_before": before, "loss_after": after, "since": since}
    return Breach(evidence, f"{after:.3g}, and {before:.3g} before")
