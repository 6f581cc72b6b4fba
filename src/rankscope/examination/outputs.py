"""Outputs that do not depend on the input."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from rankscope.examination._examination import Examination, ModuleCall
from rankscope.examination._spec import Finding, cause
from rankscope.examination._tensors import redrawn

LOST = 1e-3
"""Spread of the outputs, relative to that of the inputs, below which the input counts as lost."""
OUTPUTS = "how much the outputs of different inputs differ, relative to their size"


def raw_apart(x: Examination) -> float:
    """How much the inputs themselves differ; 1 for ids that differ."""
    distances = []
    for value in x.mains:
        if value.is_floating_point():
            one = x.inputs_apart(value)
            distances += [] if one is None else [one]
        else:
            rows = value.movedim(x.batch.axis, 0)
            distances.append(1.0 if any(not torch.equal(rows[0], row) for row in rows[1:]) else 0.0)
    return max(distances, default=0.0)


def begins_at_zero(x: Examination) -> bool:
    """Whether outputs are alike because weights begin at zero, get a gradient, and so move with the first step."""
    known: bool | None = vars(x).get("_begins_at_zero")
    if known is None:
        zero = {name: one.detach() for name, one in x.model.named_parameters() if not bool(one.detach().any())}
        zero = {name: one for name, one in zero.items() if (g := x.gradients.get(name)) is not None and bool(g.any())}
        drawn = torch.Generator().manual_seed(0)
        replaced = {name: (0.02 * torch.randn(one.shape, generator=drawn)).to(one) for name, one in zero.items()}
        output = x.output(replaced=replaced) if replaced else None
        known = output is not None and (x.inputs_apart(output) or 0.0) > LOST * raw_apart(x)
        vars(x)["_begins_at_zero"] = known
    return known


@cause(
    proof="the first module is found whose input depends on the input of the model and whose output does not; with new "
    "weights for it, or for the one before, the output depends on the input again",
    change="why the weights went there: bias, learning rate, initialisation",
    order=40,
)
def lost_in_module(x: Examination) -> Iterator[Finding]:
    """A module behind which all inputs are alike."""
    if x.result is None:
        return
    before, raw = x.inputs_apart(x.result), raw_apart(x)
    if before is None or raw == 0.0 or before > LOST * raw or begins_at_zero(x):
        return
    calls = [call for call in x.base if call.is_leaf and call.name is not None]
    for place, call in enumerate(calls):
        given = None if call.given is None else x.inputs_apart(call.given)
        left = None if call.output is None else x.inputs_apart(call.output)
        if given is None or left is None or given < 10 * LOST * raw or left > 10 * LOST * given:
            continue
        for suspect in _suspects(calls, place):
            assert suspect.name is not None
            output = x.output(replaced=redrawn([(suspect.name, suspect.module)]))
            after = None if output is None else x.inputs_apart(output)
            if after is not None and after > max(100 * before, LOST * raw):
                yield _finding(x, call, suspect, before, after)
                return
        yield Finding(
            "lost_in_module",
            f"All inputs are alike after {call.name} ({type(call.module).__name__}), and were not before it.",
            f"Look at what {call.name} receives and returns; new weights for it alone do not help.",
            certainty="possible",
            measured=OUTPUTS,
            before=before,
            where=call.name or "",
        )
        return


def _suspects(calls: list[ModuleCall], place: int) -> list[ModuleCall]:
    """The module itself and the three with weights before it."""
    with_weights = [call for call in calls[: place + 1] if any(True for _ in call.module.parameters(recurse=False))]
    return list(reversed(with_weights))[:4]


def _finding(x: Examination, call: ModuleCall, suspect: ModuleCall, before: float, after: float) -> Finding:
    name = type(call.module).__name__
    dead = call.output is not None and not bool(call.output.any())
    how = (
        f"all its outputs are 0 (its inputs are at most {float(call.given.max()):.3g})"
        if dead and (call.given is not None)
        else "its output is the same for every input"
    )
    return Finding(
        "lost_in_module",
        f"The input is lost in {call.name} ({name}): {how}. The weights of {suspect.name} are the reason.",
        f"Look at how the weights and the bias of {suspect.name} came to be what they are",
        measured=OUTPUTS,
        before=before,
        after=after,
        intervention=f"with new weights for {suspect.name}",
        where=suspect.name or "",
    )
