"""Training against evaluation, and two equal passes."""

from __future__ import annotations

import torch

from rankscope.examination.experiments.dependencies import LOST, raw_apart
from rankscope.examination.experiments.operations import first_that_differs
from rankscope.examination.outcomes import NO, NOT_READ, Outcome, experiment
from rankscope.examination.passes import Examination, ModuleCall, in_training

DROPPED = 0.9
"""Share of the entries from which on dropout drops nearly everything; published models drop half at most."""


@experiment
def passes_differ(x: Examination) -> Outcome:
    """Whether two equal passes differ; the control is a pass with the same random numbers, which must not."""
    if not x.noise:
        return NO
    one, other = x.output(), x.output()
    if one is None or other is None:
        return NOT_READ
    return Outcome(True, not torch.equal(one, other), {"noise": x.noise, "step": first_that_differs(x)})


@experiment
def dropout_hides_inputs(x: Examination) -> Outcome:
    """Whether nearly everything is dropped in training mode; the control: outputs are alike without dropout too."""
    trained = x.once(in_training)
    high = [(where, p) for where, p in trained.dropped if p >= DROPPED]
    if not high or trained.apart is None:
        return NO
    after = x.backward(drops=False, gradients=False).apart
    if after is None:
        return NOT_READ
    numbers = {"where": high[0][0], "p": high[0][1], "before": trained.apart, "after": after}
    return Outcome(True, not after > 0, numbers)


@experiment
def not_finite(x: Examination) -> Outcome:
    """Whether values are not finite, and in which module first.

    The control is the effect at the output: infinity may be meant inside, as for keys that are hidden, unless it is
    the end of the range of float16.
    """
    broken = next((call for call in x.base if _breaks(call)), None)
    if broken is None or x.result is None:
        return NO
    harmless = not bool(torch.isnan(x.result).any()) and all(p.dtype != torch.float16 for p in x.model.parameters())
    share = float(torch.isfinite(x.result).double().mean())
    weights = [n for n, p in broken.module.named_parameters(broken.name or "") if not bool(torch.isfinite(p).all())]
    return Outcome(True, harmless, {"call": broken, "share": share, "weights": weights})


def _breaks(call: ModuleCall) -> bool:
    """Whether a module returned what is not finite, for what is."""
    if call.output is None or bool(torch.isfinite(call.output).all()):
        return False
    return call.given is None or bool(torch.isfinite(call.given).all())


@experiment
def finite_in_float32(x: Examination) -> Outcome:
    """Whether the same pass is finite in float32; the control is whether it is finite in float16.

    Infinity inside a module may end in finite numbers, as the squares of a norm do. The control of that is an output
    that differs for different inputs all the same.
    """
    broken = x.outcome("not_finite")
    if broken.seen is False and x.scan.overflow is not None and x.result is not None:
        apart = x.inputs_apart(x.result)
        return Outcome(True, apart is None or apart > LOST * raw_apart(x), {"inside": x.scan.overflow, "apart": apart})
    halves = {n: p.detach().float() for n, p in x.model.named_parameters() if p.dtype == torch.float16}
    if not broken.shown or not halves:
        return NO
    wide = x.batch.mapped(lambda _, value, axis: value.float() if value.dtype == torch.float16 else value)
    whole = x.output(wide, replaced=halves)
    again = x.output()
    finite, control = (one is not None and bool(torch.isfinite(one).all()) for one in (whole, again))
    return Outcome(finite, control and broken["share"] < 1.0, {"inside": None, **broken.numbers})
