"""A part of the model is changed inside a ``with`` block, and tokens after each block, or attention, are compared.

The control of each change: the same architecture with the weights that it begins with. If tokens stay apart there,
training made them alike, and no change of the architecture is claimed to be its cause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from rankscope.examination import source
from rankscope.examination.experiments.dependencies import LOST, begins_at_zero, raw_apart
from rankscope.examination.findings import NOT_MADE, CarriedOut
from rankscope.examination.outcomes import NO, NOT_READ, Outcome, experiment
from rankscope.examination.passes import Examination, ModuleCall
from rankscope.examination.source import Edit, SourcePlace
from rankscope.examination.tensors import cloned, is_trained, main_output, redrawn, shuffled, tokens_apart
from rankscope.linalg.update import skip_gain
from rankscope.models.wrapping import with_parameters
from rankscope.remedies import applied
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import Observed, trace
from rankscope.stream.viewing import undisturbed, with_proven_cuts
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation

LOW = 0.15
"""Relative residual after the last block below which tokens count as alike: below that of all 157 families."""
BETTER = 2.0
"""Factor by which an intervention has to raise it."""
KEPT = 0.5
"""Gain below which a skip loses most of the stream in a few blocks."""
CARRIED = 0.2
"""Cosine of the change of a token and the change of what a block returns for it, below which no skip leads around."""
EXPLODES = 100
"""Growth of the stream over all blocks above which it explodes; sums of branches grow as a root of the depth."""
ONE_HOT = 0.1
"""Relative entropy of attention below which it picks one key."""
MIXED = 0.3
"""Relative entropy above which an intervention is said to have changed that."""
FLAT = 2e-3
"""Spread of the scores of a row below which attention is uniform."""
ONE_DIRECTION = 0.98
"""Share of the difference between inputs in one direction from which on a norm removes nearly all of it."""


# Blocks and their states.


def block_states(
    x: Examination, *, add_input: Sequence[str] = (), replaced: Mapping[str, Tensor] | None = None
) -> list[Tensor]:
    """What each block returns, ``batch tokens dim``; with its input added for the blocks that are named."""
    by_block: list[Tensor] = []

    def note(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            states = main_output(output)
            if states is None:
                return output
            new: Any = output
            given = next((t for t in pytree.tree_leaves((args, kwargs)) if _like(t, states)), None)
            if name in add_input and given is not None:
                leaves, spec = pytree.tree_flatten(output)
                total = states + given
                new = pytree.tree_unflatten([total if leaf is states else leaf for leaf in leaves], spec)
                states = total
            by_block.append(_canonical(x, states.detach()))
            return new

        return hook

    with ExitStack() as hooks:
        for name, module in x.blocks:
            hooks.callback(module.register_forward_hook(note(name), with_kwargs=True).remove)
        x.run(replaced=replaced)
    return by_block


def _like(value: Any, states: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == states.shape and value.is_floating_point()


def _canonical(x: Examination, states: Tensor) -> Tensor:
    if states.ndim == 2:
        return states[None]
    return states.transpose(0, 1) if x.stack is not None and x.stack.layout == "tokens batch dim" else states


def plain_states(x: Examination) -> list[Tensor]:
    """What each block returns, in the pass on the batch as it is."""
    blocks = {module for _, module in x.blocks}
    outputs = [call.output for call in x.base if call.module in blocks]
    if any(one is None for one in outputs):  # more than is kept of a pass
        return block_states(x)
    return [_canonical(x, one) for one in outputs if one is not None]


def residuals(x: Examination, states: Sequence[Tensor]) -> list[float]:
    """Mean relative residual of the tokens that count, after each block."""

    def keep(one: Tensor) -> Tensor | None:
        kept = x.batch.keep
        return kept if kept is not None and kept.shape == one.shape[:2] else None

    return [tokens_apart(one, keep(one)) for one in states if one.ndim == 3]


def curve(x: Examination) -> list[float]:
    """The same of the pass on the batch as it is; empty if there are no blocks."""
    return residuals(x, x.once(plain_states)) if x.blocks else []


def _last(x: Examination, **changed: Any) -> list[float]:
    """The same with a change; one number below all others if blocks return no states."""
    return residuals(x, block_states(x, **changed)) or [-1.0]


def _fell(x: Examination) -> bool:
    """Whether tokens are alike after the last block and were not when they entered."""
    known = x.once(curve)
    if not known or not known[-1] < LOW:
        return False
    first = next((call for call in x.base if call.module is x.blocks[0][1]), None)
    given = None if first is None else first.given
    entry = tokens_apart(_canonical(x, given)) if given is not None and given.ndim in (2, 3) else math.nan
    return not entry < 2 * LOW


def _raised(x: Examination, after: float) -> bool:
    return after > max(BETTER * x.once(curve)[-1], LOW / 2)


def made_by_training(x: Examination) -> bool:
    """Whether tokens stay apart with the weights that the model begins with, if it has others."""
    if x.build is None and not is_trained(x.model):
        return False
    return _last(x, replaced=x.fresh)[-1] > 2 * LOW


def in_blocks(x: Examination, names: Sequence[str], edit: Callable[[SourcePlace, nn.Module], list[Edit]]) -> CarriedOut:
    """An edit of the blocks' forward, if tokens stay apart with it."""
    named = dict(x.blocks)
    block = named[names[0]]
    place = source.place_of(type(block).forward) if x.edits else None
    if place is None or any(type(named[name]) is not type(block) for name in names):
        return NOT_MADE
    return x.edited("", place, edit, block, better=lambda again: _raised(x, _last(again)[-1]))


@experiment
def skips_missing(x: Examination) -> Outcome:
    """Whether tokens stay apart if each block without a skip gets one; the control are weights as they begin."""
    if len(x.blocks) < 2 or not _fell(x):
        return NO
    bare, some = _without_skips(x)
    if 2 * len(bare) <= len(x.blocks):
        return NO
    after = _last(x, add_input=bare)
    if not _raised(x, after[-1]):
        return NO
    return Outcome(
        True, x.once(made_by_training), {"names": bare, "some": some, "curve": x.once(curve), "after": after}
    )


def _without_skips(x: Examination) -> tuple[list[str], bool]:
    """Blocks around which no skip leads, and whether some have a sum inside, around a part of them.

    Blocks with fewer skips than attention and an MLP need, or with sums that are no known skips, are given another
    input: a skip around the whole block turns what it returns into the direction of the change.
    """
    if x.stack is None:
        return [name for name, _ in x.blocks], False
    plans = {call.module_name: [len(plan.skips) for plan in call.blocks] for call in x.stack.calls}
    if not x.stack.carries and not any(0 < count < 2 for counts in plans.values() for count in counts):
        return [name for name, counts in plans.items() if not any(counts)], False
    return [name for name, along in _carried(x).items() if along < CARRIED], True


def _carried(x: Examination) -> dict[str, float]:
    """Mean cosine between a random change of what enters each block and that of what leaves it, by token.

    Every block is given what it took in the pass on the batch as it is, so that one pass is enough. Changes are as
    large as the tokens. Blocks that do not return what they take, or of which no copy was kept, are left out.
    """
    calls = {call.module: call for call in x.base}
    shares: dict[str, float] = {}
    drawn = torch.Generator().manual_seed(0)

    def note(name: str, given: Tensor, left: Tensor) -> tuple[Callable[..., Any], Callable[..., None]]:
        size = given.norm(dim=-1, keepdim=True) / given.shape[-1] ** 0.5
        change = torch.randn(given.shape, generator=drawn).to(given) * size

        def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            place = next((at for at, leaf in enumerate(leaves) if _like(leaf, given)), None)
            if place is not None:
                leaves[place] = given + change
            return pytree.tree_unflatten(leaves, spec)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            out = main_output(output)
            if out is not None and out.shape == left.shape:
                along = nn.functional.cosine_similarity(out.detach().float() - left.float(), change.float(), dim=-1)
                shares[name] = float(along.mean())

        return enter, leave

    with ExitStack() as hooks:
        for name, module in x.blocks:
            call = calls.get(module)
            if call is None or call.given is None or call.output is None or not _like(call.given, call.output):
                continue
            enter, leave = note(name, call.given, call.output)
            hooks.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            hooks.callback(module.register_forward_hook(leave).remove)
        x.run()
    return shares


@experiment
def skips_weak(x: Examination) -> Outcome:
    """Whether tokens stay apart if skips that carry less than half carry all; the control are weights as they begin."""
    if x.view is None or not _fell(x):
        return NO
    gains = _gains(x)
    weak = sorted(gain for gain in gains.values() if abs(gain) < KEPT)
    if 2 * len(weak) <= len(gains) or not weak or weak[len(weak) // 2] == 0.0:
        return NO
    gain = weak[len(weak) // 2]
    with operating(x.model, Operation(attention_skip=1 / gain, mlp_skip=1 / gain), view=with_proven_cuts(x.view)):
        after = _last(x)
    if not _raised(x, after[-1]):
        return NO
    numbers = {"gain": gain, "weak": len(weak), "count": len(gains), "curve": x.once(curve), "after": after}
    return Outcome(True, x.once(made_by_training), numbers)


def _gains(x: Examination) -> dict[int, float]:
    """Gain of the first skip of each block: ``total = g stream + branch`` is solved for g."""
    assert x.view is not None
    assert x.stack is not None
    name = x.stack.name
    stream: dict[int, Tensor] = {}
    branch: dict[int, Tensor] = {}
    gains: dict[int, float] = {}

    def see(ref: SiteRef, seen: Observed) -> None:
        if not isinstance(seen, Tensor) or ref.stack != name or ref.layer in gains:
            return
        if ref.site == "block.in":
            stream[ref.layer] = seen.detach().clone()
        elif ref.site.endswith(".out"):
            branch.setdefault(ref.layer, seen.detach().clone())
        elif ref.layer in stream and ref.layer in branch:
            gain = skip_gain(seen.detach(), branch[ref.layer], stream[ref.layer])
            if math.isfinite(gain):
                gains[ref.layer] = gain

    labels = ("attention", "mixer", "mlp", "both")
    sites = ("block.in", *(f"{label}.{end}" for label in labels for end in ("out", "sum")))
    x.forward_passes += 1
    with undisturbed(x.model), trace(x.view, SiteSelection.parse(sites), see):
        x.batch.run(x.model)
    return gains


@contextmanager
def own_norms_first(x: Examination) -> Iterator[bool]:
    """Run torch's own layers with their norms first; False if the blocks are not such layers, or have them first.

    The class decides only which switch is turned: that of these two is part of their interface. What is claimed are the
    numbers before and after; other blocks are changed by a remedy.
    """
    kinds = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    layers = [block for _, block in x.blocks if isinstance(block, kinds) and not block.norm_first]
    if not layers or len(layers) < len(x.blocks):
        yield False
        return
    try:
        for layer in layers:
            layer.norm_first = True
        yield True
    finally:
        for layer in layers:
            layer.norm_first = False


@experiment
def layers_cloned(x: Examination) -> Outcome:
    """Whether blocks have equal weights; the control are entries of each matrix in another order.

    If tokens are as alike then, being copies makes little difference.
    """
    same = cloned([block for _, block in x.blocks])
    if not same or not x.once(curve):
        return NO
    replaced: dict[str, Tensor] = {}
    for number in same:
        name, block = x.blocks[number]
        for inner, parameter in block.named_parameters():
            if parameter.ndim >= 2:
                replaced[f"{name}.{inner}" if name else inner] = shuffled(parameter, number * 1009 + len(replaced))
    after = _last(x, replaced=replaced)
    named = dict(x.model.named_parameters())
    unchanged = all(torch.equal(named[name].detach(), one) for name, one in replaced.items())
    known = x.once(curve)
    numbers = {"count": len(same) + 1, "curve": known, "after": after}
    return Outcome(True, unchanged, numbers | {"matters": after[-1] >= BETTER * known[-1]})


@experiment
def norms_after_sums(x: Examination) -> Outcome:
    """Whether tokens stay apart with the norms before the branches; the control are weights as they begin."""
    if x.stack is None or x.view is None or not _fell(x):
        return NO
    if 2 * sum(plan.post_norm for plan in x.stack.plans) < x.stack.depth:
        return NO
    with ExitStack() as opened:
        is_own = opened.enter_context(own_norms_first(x))
        if not is_own:
            opened.enter_context(applied(x.model, "pre_norm", view=with_proven_cuts(x.view)))
        after = _last(x)
    if not _raised(x, after[-1]):
        return NO
    return Outcome(True, x.once(made_by_training), {"own": is_own, "curve": x.once(curve), "after": after})


@experiment
def stream_grows(x: Examination) -> Outcome:
    """Whether the stream grows by a factor per block; the control are branches that write less.

    It is claimed only if it does not grow so with the matrices that write to the stream scaled down.
    """
    sizes = [float(one.double().square().mean().sqrt()) for one in x.once(plain_states)] if x.blocks else []
    if len(sizes) < 3 or not all(math.isfinite(size) and size > 0 for size in sizes):
        return NO
    growth, middle = sizes[-1] / sizes[0], sizes[len(sizes) // 2]
    # By a factor per block, not by steps: massive activations appear at once, sums of branches grow as a root.
    if growth < EXPLODES or not (middle / sizes[0] > growth**0.25 and sizes[-1] / middle > growth**0.25):
        return NO
    factor, named = 1 / math.sqrt(2 * len(sizes)), dict(x.model.named_parameters())
    # The last matrix of each part of a block is a guess of what writes to the stream; if it is wrong, nothing changes.
    last = [
        ".".join(filter(None, (name, child, linear[-1], "weight")))
        for name, block in x.blocks
        for child, part in block.named_children()
        if (linear := [n for n, m in part.named_modules() if isinstance(m, nn.Linear)])
    ]
    if not last:
        return NO
    states = block_states(x, replaced={name: named[name].detach() * factor for name in last})
    after = [float(one.double().square().mean().sqrt()) for one in states]
    numbers = {
        "growth": growth,
        "sizes": [size / sizes[0] for size in sizes],
        "after": [one / after[0] for one in after],
    }
    return Outcome(True, after[-1] / after[0] > growth / 10, numbers)


# Attention.


@dataclass(frozen=True)
class AttentionSeen:
    """One call of attention, as numbers.

    Attributes:
        block: stack and number of its block.
        entropy: relative entropy of the rows that see several keys, by head.
        spread: standard deviation of the scores of a row, by head.
        largest: largest score.
        by_key: largest weight on each key, ``sequences keys``; None if sequences are not told apart.
        ahead: share of the weights on later tokens; None if queries and keys differ in number.
    """

    block: tuple[str | None, int]
    entropy: Tensor
    spread: Tensor
    largest: float
    by_key: Tensor | None
    ahead: float | None


def attention_seen(x: Examination, replaced: tuple[tuple[str, Tensor], ...] = ()) -> list[AttentionSeen]:
    """Every call of attention in a pass, with other parameters if given; empty if it cannot be seen."""
    seen_calls: list[AttentionSeen] = []
    if x.view is None:
        return seen_calls

    def see(ref: SiteRef, seen: Observed) -> None:
        if isinstance(seen, AttentionCall):
            seen_calls.append(_attention(seen, ref))

    x.forward_passes += 1
    sites = SiteSelection.parse(("attention.probs",))
    with undisturbed(x.model), with_parameters(x.model, dict(replaced)), trace(x.view, sites, see):
        x.batch.run(x.model)
    return seen_calls


def _attention(call: AttentionCall, ref: SiteRef) -> AttentionSeen:
    probs = call.probs().detach().double()
    support = call.support()
    seen = torch.ones_like(probs, dtype=torch.bool) if support is None else support.expand_as(probs)
    several = seen.sum(-1) > 1
    entropy = -(probs * probs.clamp_min(1e-300).log()).sum(-1) / seen.sum(-1).clamp_min(2).log()
    logs = probs.clamp_min(1e-30).log()
    mean = (logs * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)
    spread = (((logs - mean) * seen).square().sum(-1) / seen.sum(-1).clamp_min(1)).sqrt()
    heads = range(probs.shape[1]) if probs.ndim == 4 else ()
    largest = call.largest_scores() if call.scores is not None or call.query is not None else None
    square = probs.shape[-1] == probs.shape[-2] > 1

    def by_head(rows: Tensor) -> Tensor:
        return torch.tensor([float(rows[:, h][several[:, h]].mean()) for h in heads], dtype=torch.float64)

    return AttentionSeen(
        (ref.stack, ref.layer),
        by_head(entropy),
        by_head(spread),
        float("nan") if largest is None else float(largest.max()),
        probs.amax((1, 2)) if probs.ndim == 4 else None,
        float(probs.triu(1)[..., :-1, :].sum() / probs[..., :-1, :].sum()) if square else None,
    )


def _by_block(x: Examination, seen: Sequence[AttentionSeen]) -> list[AttentionSeen]:
    """The first call of each block of the deepest stack."""
    first: dict[int, AttentionSeen] = {}
    for one in seen:
        if x.stack is not None and one.block[0] == x.stack.name:
            first.setdefault(one.block[1], one)
    return list(first.values())


def _mean(values: Sequence[Tensor]) -> float:
    means = [float(one.mean()) for one in values if len(one)]
    return sum(means) / len(means) if means else math.nan


def _entropy(x: Examination, seen: Sequence[AttentionSeen]) -> float:
    return _mean([one.entropy for one in _by_block(x, seen)])


def _spread(x: Examination, seen: Sequence[AttentionSeen]) -> float:
    return _mean([one.spread for one in _by_block(x, seen)])


def _head_width(x: Examination) -> int | None:
    """Width of a head, from the width of the stream and the number of heads."""
    heads = {len(one.entropy) for one in _by_block(x, x.once(attention_seen)) if len(one.entropy)}
    widths = {one.shape[-1] for one in x.once(plain_states)}
    if len(heads) != 1 or len(widths) != 1:
        return None
    width, count = widths.pop(), heads.pop()
    return width // count if width % count == 0 else None


def _with_temperature(x: Examination, value: float) -> list[AttentionSeen]:
    assert x.view is not None
    with operating(x.model, Operation(temperature=value), view=with_proven_cuts(x.view)):
        return attention_seen(x)


@experiment
def attention_one_hot(x: Examination) -> Outcome:
    """Whether attention picks a single key in nearly every row; the control is the same with smaller scores.

    Scores are divided by the square root of the width of a head, as one scale too few, and else to a largest one of 4.
    """
    seen = x.once(attention_seen)
    before = _entropy(x, seen)
    if not before < ONE_HOT:
        return NO
    largest, width = max(one.largest for one in _by_block(x, seen)), _head_width(x)
    numbers: dict[str, Any] = {"before": before, "largest": largest, "width": None}
    if width is not None and (scaled := _entropy(x, _with_temperature(x, width**0.5))) > MIXED:
        return Outcome(True, scaled < ONE_HOT, numbers | {"after": scaled, "width": width})
    after = _entropy(x, _with_temperature(x, max(largest / 4, 1.0)))
    return Outcome(True, after < ONE_HOT, numbers | {"after": after})


@experiment
def attention_flat(x: Examination) -> Outcome:
    """Whether attention is uniform and is not with scores as large as one scale makes them.

    The control are weights as torch draws them: if it is not uniform with them, small matrices make it so.
    """
    before = _spread(x, x.once(attention_seen))
    width = _head_width(x) if before < FLAT else None
    if width is None:
        return NO
    drawn = tuple(redrawn([("", x.model)]).items())
    control = _spread(x, attention_seen(x, drawn)) > 10 * FLAT
    for power in (1.5, 1.0, 0.5):
        after = _spread(x, _with_temperature(x, width**-power))
        if 0.02 < after < 5:
            return Outcome(True, control, {"before": before, "after": after, "width": width, "power": power})
    return NO


@experiment
def padding_alone(x: Examination) -> Outcome:
    """Whether all weights of attention lie on the one id that fills the ends of sequences; the control are the others.

    A filling begins anywhere but at the first token, in most sequences, and nothing follows it.
    """
    if len(x.texts) != 1 or x.view is None:
        return NOT_READ
    ids = x.texts[0]
    ends = [ids == value for value in torch.unique(ids[:, -1])]
    padding = [
        one
        for one in ends
        if torch.equal(one.cummax(1).values, one) and not one[:, 0].any() and 2 * one[:, -2].sum() > len(one)
    ]
    if len(padding) != 1:
        return NOT_READ
    rows = padding[0][:, -1]
    hidden = padding[0][rows]
    weights = [
        one.by_key[rows] for one in x.once(attention_seen) if one.by_key is not None and one.by_key.shape == ids.shape
    ]
    if not weights:
        return NOT_READ
    on_others = max(float(one.masked_fill(hidden, 0.0).max()) for one in weights)
    on_padding = max(float(one.masked_fill(~hidden, 0.0).max()) for one in weights)
    return Outcome(on_others == 0.0, on_padding == 0.0, {"id": int(ids[rows][0, -1])})


# Where inputs are lost to weights.


@experiment
def one_direction(x: Examination) -> Outcome:
    """Whether inputs differ, at the first block, by the same number in all channels; the control are the tokens.

    Their own difference, of positions too, must not lie in that direction as well.
    """
    first = next((call for call in x.base if x.blocks and call.module is x.blocks[0][1]), None)
    given = None if first is None else first.given
    axis = None if given is None else x.sequence_axis(given)
    if given is None or axis is None or given.ndim != 3 or given.shape[-1] < 4:
        return NOT_READ

    def share(between: Tensor) -> float:
        size = float(between.norm())
        if not size > 1e-6 * float(given.double().norm()):
            return 0.0
        return float(between.mean(-1, keepdim=True).expand_as(between).norm()) / size

    states = given.double()
    along, tokens = (share(states - states.mean(at, keepdim=True)) for at in (axis, 1 - axis if axis < 2 else 1))
    return Outcome(along > ONE_DIRECTION, tokens > ONE_DIRECTION, {"share": along})


@experiment
def lost_in_part(x: Examination) -> Outcome:
    """Whether all inputs are alike after a module and were not before it; the control are new weights for it.

    With them, or with new weights for a module before it, the output must depend on the input again.
    """
    if x.result is None:
        return NOT_READ
    before, raw = x.inputs_apart(x.result), raw_apart(x)
    if before is None or raw == 0.0 or before > LOST * raw or x.once(begins_at_zero):
        return NO
    calls = [call for call in x.base if call.is_leaf and call.name is not None]
    for place, call in enumerate(calls):
        given = None if call.given is None else x.inputs_apart(call.given)
        left = None if call.output is None else x.inputs_apart(call.output)
        if given is None or left is None or given < 10 * LOST * raw or left > 10 * LOST * given:
            continue
        suspects = [one for one in calls[: place + 1] if any(True for _ in one.module.parameters(recurse=False))]
        after = 0.0
        for suspect in list(reversed(suspects))[:4]:  # the module itself and the three with weights before it
            after = _apart_with_new(x, suspect)
            if after > max(100 * before, LOST * raw):
                numbers = {"call": call, "suspect": suspect, "before": before, "after": after}
                return Outcome(True, after <= before, numbers)
        return NO
    return NO


def _apart_with_new(x: Examination, suspect: ModuleCall) -> float:
    """How much outputs differ with new weights for a module."""
    assert suspect.name is not None
    output = x.output(replaced=redrawn([(suspect.name, suspect.module)]))
    return 0.0 if output is None else x.inputs_apart(output) or 0.0
