"""What looks like a fault and is none."""

from __future__ import annotations

from collections.abc import Iterator

from rankscope._citations import Cite
from rankscope.causes._examination import Examination
from rankscope.causes._spec import Finding, cause
from rankscope.causes._tensors import apart


@cause(
    proof="after their common vector is subtracted, inputs point in many directions",
    change="nothing; subtract the mean before comparing by cosine",
    order=80,
)
def mean_offset(x: Examination) -> Iterator[Finding]:
    """A large vector that all tokens share."""
    if not x.plain_states:
        return
    states = x.plain_states[-1].double()
    flat = states.flatten(0, -2)
    before = apart(flat)
    if not 1e-3 < before < 0.35:
        return
    centred = flat - flat.mean(0)
    import torch

    values = torch.linalg.svdvals(centred)
    rank = float(values.sum().square() / values.square().sum())
    if rank < 4:
        return
    cosine = float(1 - before**2)
    yield Finding(
        "mean_offset",
        f"All tokens share a large common vector, so that any two have a cosine of about {cosine:.2f}; around it they "
        f"differ in many directions ({rank:.0f}). This is usual in trained models and harmless.",
        "Subtract the mean over many inputs before comparing by cosine",
        kind="harmless",
        measured="how much tokens differ, relative to their size",
        before=before,
        after=apart(centred),
        intervention="after the mean was subtracted",
    )


@cause(
    proof="the largest norm of a token is compared with the median",
    change="nothing",
    order=80,
    cites=(Cite("sun2024massive"),),
)
def massive_activations(x: Examination) -> Iterator[Finding]:
    """A few tokens with a huge norm."""
    for number, states in enumerate(x.plain_states if x.blocks else ()):
        norms = states.double().norm(dim=-1)
        ratio = float(norms.max() / norms.median())
        if ratio > 30:
            channel = int(states.double().abs().amax(dim=tuple(range(states.ndim - 1))).argmax())
            yield Finding(
                "massive_activations",
                f"From block {number} on, one token has a norm {ratio:.0f} times the median, in channel {channel}. "
                "Trained transformers do this on the first token; it is harmless for the others.",
                "Nothing; leave these tokens out of averages (Inputs(tokens_policy='no-first'))",
                kind="harmless",
                measured="largest norm of a token over the median",
                before=ratio,
            )
            return


@cause(
    proof="the change of the stream by each block is measured",
    change="nothing",
    order=81,
)
def idle_blocks(x: Examination) -> Iterator[Finding]:
    """Blocks that change the stream little."""
    states = x.plain_states if x.blocks else []
    idle = []
    for number in range(1, len(states)):
        before, after = states[number - 1].double(), states[number].double()
        # Token by token: one huge token that stays as it is would hide what happens to all others.
        if before.shape == after.shape and bool(((after - before).norm(dim=-1) < 0.01 * before.norm(dim=-1)).all()):
            idle.append(number)
    if idle and len(idle) < len(states) - 1:
        which = f"Block {idle[0]} changes" if len(idle) == 1 else f"Blocks {', '.join(map(str, idle))} change"
        yield Finding(
            "idle_blocks",
            f"{which} every token by less than 1%. At initialisation this is meant (zero-initialised or scaled "
            "branches).",
            "Nothing",
            kind="harmless",
            measured="number of blocks that change every token by less than 1%",
            before=float(len(idle)),
        )
