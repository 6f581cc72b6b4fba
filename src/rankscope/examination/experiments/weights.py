"""Softmax calls and heads of attention, as ``scan`` saw them in the first pass."""

from __future__ import annotations

import math

from rankscope.examination.outcomes import NO, Outcome, experiment
from rankscope.examination.passes import Examination
from rankscope.examination.source import SourcePlace


def attention_softmax(x: Examination) -> SourcePlace | None:
    """Where the softmax over keys is written, if it is written in one place."""
    size = x.tokens
    square = [one for one in x.scan.calls if one.shape[-1] == size and one.shape[-2:-1] == (size,)]
    places = {one.place for one in square}
    return places.pop() if len(places) == 1 else None


@experiment
def weights_off_one(x: Examination) -> Outcome:
    """Whether weights of attention do not sum to one over the keys; the control is another pass with other numbers."""
    wrong = x.scan.wrong()
    return Outcome(True, x.noise > 0, {"wrong": wrong}) if wrong else NO


@experiment
def heads_mixed(x: Examination) -> Outcome:
    """Whether heads are split or merged across tokens; the control are other heads that are not.

    A model that does so on purpose in some places and not in others is left alone.
    """
    mixed = x.scan.mixed
    return Outcome(True, x.noise > 0, {"mixed": mixed}) if mixed else NO


@experiment
def softmax_of_one(x: Examination) -> Outcome:
    """Whether a softmax runs over an axis of one entry although there are tokens; the control are its gradients.

    A softmax of one entry is a constant, so that what it is given has no gradient. A single key has the same effect.
    """
    single = [one for one in x.scan.calls if one.shape[one.axis] == 1 and math.prod(one.shape) > 1]
    lone = [(one, axis) for one in single if (axis := _tokens_in(x, one.shape)) is not None]
    if not lone:
        return NO
    sizes = {n: float(g.abs().max()) for n, g in x.gradients.items() if g is not None and g.numel()}
    silent = [name for name, size in sizes.items() if size <= 1e-7 * max(sizes.values())]
    return Outcome(True, not silent, {"call": lone[0][0], "axis": lone[0][1], "names": silent})


def _tokens_in(x: Examination, shape: tuple[int, ...]) -> int | None:
    """The axis that counts tokens; the axis of the sequences, if the numbers are equal, comes where inputs have it."""
    if x.tokens is None or x.tokens < 2 or x.tokens not in shape:
        return None
    places = [at for at, size in enumerate(shape) if size == x.tokens]
    if x.tokens == x.sequences and x.batch.axis in places and len(places) > 1:
        places.remove(x.batch.axis)
    return places[0]
