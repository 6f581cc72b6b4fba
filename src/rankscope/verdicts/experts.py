"""Whether routers use their experts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from rankscope.runs.curves import curve
from rankscope.runs.rows import of_stack, only
from rankscope.verdicts.axes import AxisFinding
from rankscope.verdicts.sentences import say, short
from rankscope.verdicts.states import IDLE_EXPERTS, State

METRIC, SITE = "effective_experts", "mlp.router"

Routers = Mapping[tuple[str | None, int], tuple[int, int]]
"""Stack and layer of a router to its number of experts, and how many of them each token goes to."""


def experts_findings(table: pa.Table, routers: Routers) -> list[AxisFinding]:
    r"""One finding about all routers; none without routers that have a choice.

    A router that sends every token to the same k of its E experts has k effective experts. It counts as collapsed if
    the experts in use beyond these, :math:`(e^H - k)/(E - k)`, are at most a tenth.
    """
    here = only(table, metric=METRIC, site=SITE)
    uses: dict[tuple[str | None, int], float] = {}
    for stack in {stack for stack, _ in routers}:
        rows = of_stack(here, stack)
        if rows.num_rows:
            line = curve(rows, METRIC, SITE)
            uses |= {(stack, int(layer)): float(mean) for layer, mean in zip(line.layers, line.mean, strict=True)}
    uses = {place: used for place, used in uses.items() if np.isfinite(used) and routers[place][0] > routers[place][1]}
    if not uses:
        return []
    spare = {
        place: (used - routers[place][1]) / (routers[place][0] - routers[place][1]) for place, used in uses.items()
    }
    worst = min(spare, key=lambda place: spare[place])
    idle = [place for place in spare if spare[place] <= IDLE_EXPERTS]
    code = State.COLLAPSED if idle else State.HEALTHY
    if idle:
        words = say("idle experts", idle=len(idle), routers=len(spare))
    else:
        used, sizes = (
            " to ".join(dict.fromkeys((short(min(values)), short(max(values)))))
            for values in (list(uses.values()), [routers[place][0] for place in uses])
        )
        words = say("experts", used=used, experts=sizes)
    experts, chosen = routers[worst]
    name = f"{worst[0]} block" if worst[0] else "block"
    details = f"Experts: {name} {worst[1]} uses {short(uses[worst])} of {experts}, {chosen} per token."
    evidence = (
        {"code": code.code, "metric": METRIC, "site": SITE, "stack": worst[0], "layer": worst[1],
         "value": uses[worst]},
    )  # fmt: skip
    return [AxisFinding("experts", code.code, words, evidence, details=details)]
