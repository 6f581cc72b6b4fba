"""Different inputs get the same representation."""

from __future__ import annotations

import math

from rankscope._citations import Cite
from rankscope.monitor.alarms._spec import DEEP, Judgement, LayerState, alarm, fallen
from rankscope.verdicts.states import AVERAGING, COLLAPSED_RESIDUAL

BEGAN = 80.0
"""Times closer than at the start, below which inputs that were alike from the start are as they were."""


@alarm(
    metrics=("inputs_relative_residual",),
    title="Inputs collapse",
    cites=(Cite("chen2021simsiam"),),
)
def input_collapse(layer: LayerState) -> Judgement | None:
    """The pooled inputs have collapsed as ``measure`` would say.

    **Heuristic.** Severity is 0.03 / r, with r the relative residual of the inputs of the probe, each the mean of its
    tokens; 0 if averaging over many tokens explains r. Needs a probe of at least eight different inputs. Inputs that
    were alike in each of the first readings, as with a token embedding that begins small beside the positions, may part
    later.
    """
    if not layer.has("inputs_relative_residual"):
        return None
    now = layer.now["inputs_relative_residual"]
    start = layer.start.get("inputs_relative_residual", math.nan)
    averaging = layer.now.get("inputs_averaging_residual", math.nan)
    severity = 0.0 if now >= AVERAGING * averaging else fallen(now, COLLAPSED_RESIDUAL)
    highest = layer.highest.get("inputs_relative_residual", math.nan)
    began_so = highest <= COLLAPSED_RESIDUAL and BEGAN * now > highest
    return Judgement(
        severity=severity,
        evidence={"inputs_relative_residual": now, "at_start": start, "averaging": averaging},
        words=f"relative residual between inputs {now:.2g} (start of the run {start:.2g})",
        # Without an estimate for averaging, inputs are alike because their tokens are, which passes when tokens do.
        may_pass=began_so or (severity < DEEP and (math.isnan(averaging) or _only_common(layer)) and not layer.settled),
    )


KEPT = 0.5
"""Share of the distance between inputs at the start of the run, from which on they are as distinct as they were."""


def _only_common(layer: LayerState) -> bool:
    """Whether inputs are as far apart as at the start of the run, and only a vector that all of them share has grown.

    The mean of the tokens of an input has the norm of the stream times the root of 1 - r^2, with r the relative
    residual of its tokens; times the relative residual between inputs, that is the distance between inputs.
    """
    now, start = (
        of.get("inputs_relative_residual", math.nan)
        * of.get("stream_rms", math.nan)
        * math.sqrt(max(0.0, 1.0 - of.get("relative_residual", math.nan) ** 2))
        for of in (layer.now, layer.start)
    )
    return now >= KEPT * start
