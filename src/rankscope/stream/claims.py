"""What is claimed about the structure of a model, with the experiment that each claim rests on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from rankscope.models.view import BlockPlan, ModelView, Stack
from rankscope.runs.claims import Claim

_REACHES = {
    "later": "a token passes on to later tokens only: the first block is causal",
    "earlier": "a token passes on to earlier tokens only",
    "both": "a token passes on to earlier and later tokens: the first block is not causal",
    "none": "a token passes on to no other token in the first block",
}


def claims_of(view: ModelView) -> tuple[Claim, ...]:
    """Everything that is claimed about the stacks of a model, in the order in which it was found."""
    return tuple(claim for stack in view.stacks for claim in _claims(stack))


def _claims(stack: Stack) -> Iterator[Claim]:
    names = Counter(call.module_name or "the model itself" for call in stack.calls)
    yield Claim(
        "blocks",
        stack.name,
        f"{stack.depth} blocks, in {len(stack.calls)} calls of {len(names)} modules",
        "the calls of one forward pass, each taken with what it adds to its own input",
    )
    declared = "your declaration, which nothing contradicts" if stack.is_declared else None
    yield Claim("axes", stack.name, stack.layout, ", ".join(stack.agrees_with) or declared)
    yield from _skips(stack)
    yield from _roles(stack)
    # That nothing passes on, beside a branch that mixes tokens, only says that one token changed too little to be seen.
    mixes = bool(stack.plans) and bool({"attention", "mixer", "both"} & set(stack.plans[0].skips))
    if stack.reach is not None and not (stack.reach == "none" and mixes):
        yield Claim("causality", stack.name, _REACHES[stack.reach], "one token of the input was replaced")


def _skips(stack: Stack) -> Iterator[Claim]:
    count = sum(len(plan.skips) - sum(plan.joins) for plan in stack.plans)
    uncut = [carry for carry in stack.carries if carry.calls_begun is None]
    more = f", and other ways around blocks: {'; '.join(carry.where for carry in uncut[:3])}" if uncut else ""
    long = f", {len(stack.long_skips)} long skips" if stack.long_skips else ""
    yield Claim(
        "skips",
        stack.name,
        f"{count} skips with a gain that can be set{long}{more}",
        "with weights held fixed and skips removed, the stream was changed; what left each block was compared"
        if stack.cuts_proven
        else None,
    )


def _roles(stack: Stack) -> Iterator[Claim]:
    kinds: dict[tuple[str, str | None], list[int]] = {}
    for layer, plan in enumerate(stack.plans):
        for label, evidence in _branches(plan):
            kinds.setdefault((label, evidence), []).append(layer)
    for (label, evidence), layers in kinds.items():
        where = f"{len(dict.fromkeys(layers))} of {stack.depth} blocks"
        yield Claim("roles", stack.name, f"{label.replace('_', '-')} in {where}", evidence)


def _branches(plan: BlockPlan) -> Iterator[tuple[str, str | None]]:
    responses = plan.responses or (None,) * len(plan.adds)
    for label, response in zip(plan.adds, responses, strict=True):
        if label is None:
            continue
        if response is not None:
            changed = "no other token of what it adds changed" if response == "alone" else "other tokens changed too"
            yield label, f"tokens of its input were replaced, and {changed}"
        else:
            yield label, "a softmax over keys, or the fused kernel" if plan.attention and label != "mlp" else None
