"""Operations along the wrong axis, each seen by an experiment with one token or one sequence."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rankscope.examination import _source
from rankscope.examination._examination import Examination, ModuleCall
from rankscope.examination._softmaxes import Softmaxes
from rankscope.examination._source import SourcePlace
from rankscope.examination._spec import Finding, cause
from rankscope.examination._tensors import apart, change_between, changed_entries
from rankscope.stream.viewing import undisturbed


@cause(
    proof="the second sequence is replaced, and the output of the first is compared",
    change="batch_first=True, a transpose instead of a view, or the token axis",
    order=11,
)
def sequences_mix(x: Examination) -> Iterator[Finding]:
    """Sequences that influence each other."""
    if x.result is None or x.sequences < 3:
        return
    axis = x.sequence_axis(x.result)
    if axis is None:
        return
    other = x.with_other_sequence[-1].output
    if other is None or other.shape != x.result.shape:
        return
    keep = [row for row in range(x.sequences) if row != 1]
    index = torch.tensor(keep, device=x.result.device)
    gap = changed_entries(x.result.index_select(axis, index), other.index_select(axis, index))
    if gap is None or not bool(gap.any()):
        return
    fewer = x.output(x.batch.taken(0, x.sequences - 1))
    if fewer is not None and sum(one != all_ for one, all_ in zip(fewer.shape, x.result.shape, strict=False)) > 1:
        return  # a similarity: each sequence is compared with each, on purpose
    if x.labels is not None and x.labels.is_floating_point() and x.labels.shape == x.result.shape:
        one, two = (out.index_select(axis, index).double() for out in (x.result, other))
        if any(torch.allclose(gap, gap.narrow(axis, 0, 1), rtol=1e-4) for gap in (two - one, two / one)):
            return  # the batch is one list, of which the targets are shares: all others change alike
    size = change_between(x.result.index_select(axis, index), other.index_select(axis, index))
    place = _first_leak(x, index)
    name = "" if place is None else place.name or ""
    over_batch = [one for one in x.softmaxes.calls if one.axis == x.batch.axis and one.shape[one.axis] == x.sequences]
    change, is_tried = (
        "Look for view or reshape where a transpose was meant, or for an operation along the first axis",
        False,
    )
    after, intervention = 0.0, "expected"
    turned = _turned(x, index, axis)
    if turned is not None and turned < 1e-3 * size:
        kinds = {type(module) for module in x.model.modules()}
        layers: tuple[type[nn.Module], ...] = (
            nn.Transformer,
            nn.TransformerEncoderLayer,
            nn.TransformerDecoderLayer,
        )
        outer = [kind for kind in layers if kind in kinds] or [
            type(one) for one in x.model.modules() if hasattr(one, "batch_first")
        ]
        change, is_tried = f"Pass `batch_first=True` to `nn.{outer[0].__name__}`", True
        after, intervention = turned, "with batch_first=True"
    elif over_batch and (
        edited := x.edited(sequences_mix, over_batch[0].place, _source.over_axis(over_batch[0].place, -1))
    ):
        change, is_tried = f"{edited}: the first axis counts sequences, the last one keys", True
    yield Finding(
        "sequences_mix",
        f"Sequences of a batch influence each other: another second sequence changes the output of the others, first "
        f"in {name or 'the model itself'}.",
        change,
        tried=is_tried,
        measured="change of the other sequences' output",
        before=size,
        after=after,
        intervention=intervention,
        where=name,
    )


def _turned(x: Examination, index: Tensor, axis: int) -> float | None:
    """How much the other sequences change if every module that takes tokens first takes sequences first."""
    first = [module for module in x.model.modules() if getattr(module, "batch_first", None) is False]
    if not first:
        return None
    try:
        for module in first:
            module.batch_first = True  # type: ignore[assignment]
        one, other = x.output(), x.output(x.changed(lambda mask: mask[1].fill_(True)))
    except (RuntimeError, ValueError, AssertionError):
        return None  # a mask or a state that only fits the other order
    finally:
        for module in first:
            module.batch_first = False  # type: ignore[assignment]
    if one is None or other is None or one.shape != other.shape:
        return None
    return change_between(one.index_select(axis, index), other.index_select(axis, index))


def _first_leak(x: Examination, index: Tensor) -> ModuleCall | None:
    for one, other in zip(x.base, x.with_other_sequence, strict=False):
        if one.module is not other.module or one.output is None or other.output is None:
            continue
        axis = x.sequence_axis(one.output)
        if axis is None or one.output.shape != other.output.shape:
            continue
        gap = changed_entries(one.output.index_select(axis, index), other.output.index_select(axis, index))
        if gap is not None and bool(gap.any()):
            return one
    return None


@cause(
    proof="the same sequence is put in every place of the batch, and the outputs are compared",
    change="index positions by token",
    order=11,
)
def positions_by_sequence(x: Examination) -> Iterator[Finding]:
    """Positions that count sequences."""
    if x.result is None or x.sequences < 2:
        return
    axis = x.sequence_axis(x.result)
    equal = x.with_equal_sequences[-1].output
    if axis is None or equal is None:
        return
    rows = equal.movedim(axis, 0)
    gap = changed_entries(rows[:1].expand_as(rows), rows)
    if gap is None or not bool(gap.any()):
        return
    yield Finding(
        "positions_by_sequence",
        "The same sequence gets another output in another place of the batch: something depends on the place in the "
        "batch, such as positions that are added along the batch axis.",
        "Look at the axis by which positions are indexed: it has to count tokens",
        measured="difference between the outputs of equal sequences",
        before=apart(rows),
        after=0.0,
        intervention="expected",
    )


def _attention_modules(x: Examination) -> list[ModuleCall]:
    """The smallest modules with a softmax that return states of the shape they take."""
    calls: list[ModuleCall] = []
    if not x.softmaxes.calls:
        return calls
    for call in x.base:  # inner modules end before those that hold them
        if call.given is None or call.output is None or call.is_leaf or call.output.ndim != 3:
            continue
        if call.given.shape != call.output.shape or any(_inside(one.module, call.module) for one in calls):
            continue
        if all(one.module is not call.module for one in calls) and _has_softmax(call):
            calls.append(call)
    return calls


@cause(
    proof="another last token changes the output at that token only; the softmax is over a matrix of heads by heads",
    change="transpose(1, 2) before the product of queries and keys",
    order=14,
)
def tokens_do_not_mix(x: Examination) -> Iterator[Finding]:
    """Attention in which tokens do not see each other."""
    if x.result is None or x.tokens is None or x.tokens < 3:
        return
    axis = x.token_axis(x.result)
    if axis is None:
        return
    shapes = [one.shape for one in x.softmaxes.calls]
    square = [s for s in shapes if len(s) == 4 and s[-1] == s[-2] and s[-1] != x.tokens and x.tokens in s[1:2]]
    if not square or any(len(s) == 4 and s[-1] == x.tokens for s in shapes):
        return
    after = x.with_other_first[-1].output
    if after is None:
        return
    gap = changed_entries(x.result, after)
    if gap is None:
        return
    tokens = gap.movedim(axis, 0).flatten(1).any(1)
    if bool(tokens[1:].any()):
        return
    yield Finding(
        "tokens_do_not_mix",
        f"No token sees another: attention is computed between the {square[0][-1]} heads of each token instead of "
        f"between the {x.tokens} tokens of each head.",
        "Transpose heads and tokens before the product of queries and keys, and back before the output projection",
        measured="other tokens whose output changes when the first token is replaced",
        before=0.0,
        after=float(x.tokens - 1),
        intervention="expected",
    )


def attention_softmax(x: Examination) -> SourcePlace | None:
    """Where the softmax over keys is written, if it is written in one place."""
    size = x.tokens
    square = [one for one in x.softmaxes.calls if one.shape[-1] == size and one.shape[-2:-1] == (size,)]
    places = {one.place for one in square}
    return places.pop() if len(places) == 1 else None


@cause(
    proof="the weights that multiply the values are added up along the axis that the product sums over",
    change="softmax(dim=-1), after the mask",
    order=14,
)
def softmax_axis(x: Examination) -> Iterator[Finding]:
    """A softmax over another axis than the keys, or a mask after it."""
    wrong = x.softmaxes.wrong()
    if wrong:
        masked = [one for one in wrong if one.cleared > 0]
        place = wrong[0].softmax.place
        if masked:
            after = x.softmaxes.filled_after
            edits = _source.masked_before(masked[0].softmax.place, after[0] if after else None)
            general = "Mask the scores before the softmax"
        else:
            edits = _source.over_axis(place, wrong[0].summed)
            general = "Take the softmax over the axis that counts keys, usually the last one"
        change = x.edited(softmax_axis, masked[0].softmax.place if masked else place, edits)
        yield Finding(
            "softmax_axis",
            f"The weights of attention do not sum to one in {len(wrong)} products: "
            + (
                f"the mask is applied after the softmax, and sets {max(one.cleared for one in masked):.0%} of them to "
                "zero."
                if masked
                else "the softmax runs over another axis than the keys."
            ),
            change or general,
            tried=bool(change),
            measured="largest distance of the sum of a token's weights from one",
            before=max(one.axis for one in wrong),
            after=0.0,
            intervention="expected of any attention",
        )
        return
    single = [one for one in x.softmaxes.calls if one.shape[one.axis] == 1 and math.prod(one.shape) > 1]
    lone = [(one, axis) for one in single if (axis := _tokens_in(x, one.shape)) is not None]
    if not lone:
        return
    call, axis = lone[0]
    silent = [name for name, gradient in x.gradients.items() if gradient is not None and _is_rounding(gradient, x)]
    if not silent:
        return
    change = x.edited(softmax_axis, call.place, _source.over_axis(call.place, axis))
    yield Finding(
        "softmax_axis",
        f"A softmax runs over an axis of one entry (shape {call.shape}), so that all its weights are 1, whatever the "
        f"scores; {silent[0]} and {len(silent) - 1} more parameters get no gradient.",
        f"{change or f'Take the softmax over axis {axis}'}, over the {x.tokens} tokens",
        tried=bool(change),
        certainty="possible",  # a single key is legitimate, and has the same effect
        measured="parameters whose gradient is zero",
        before=float(len(silent)),
    )


def _tokens_in(x: Examination, shape: tuple[int, ...]) -> int | None:
    """The axis that counts tokens; the axis of the sequences, if the numbers are equal, comes where inputs have it."""
    if x.tokens is None or x.tokens < 2 or x.tokens not in shape:
        return None
    places = [at for at, size in enumerate(shape) if size == x.tokens]
    if x.tokens == x.sequences and x.batch.axis in places and len(places) > 1:
        places.remove(x.batch.axis)
    return places[0]


def _is_rounding(gradient: Tensor, x: Examination) -> bool:
    """Whether a gradient is zero up to rounding, compared with the largest one of the model."""
    largest = max(float(one.abs().max()) for one in x.gradients.values() if one is not None and one.numel())
    return float(gradient.abs().max()) <= 1e-7 * largest


@cause(
    proof="a module without attention is given other values at one token, and its output changes at others; its output "
    "has mean 0 and variance 1 along tokens",
    change="normalise over the last axis",
    order=14,
)
def norm_axis(x: Examination) -> Iterator[Finding]:
    """A norm along the tokens."""
    axes_seen = []
    for call in x.base:
        if call.given is None or call.output is None or not call.is_leaf or call.given.shape != call.output.shape:
            continue
        axis = x.token_axis(call.output) if call.is_alone else None
        if axis is None or call.output.ndim != 3 or not _is_normed(call.output, call.given, axis):
            continue
        moved = call.given.clone()
        moved.select(axis, 0).add_(torch.randn_like(moved.select(axis, 0)))
        with undisturbed(call.module):
            after = call.module(moved)
        gap = changed_entries(call.output, after)
        if gap is not None and bool(gap.movedim(axis, 0)[1:].any()):
            axes_seen.append(call)
    if not axes_seen:
        return
    names = list(dict.fromkeys(call.name or type(call.module).__name__ for call in axes_seen))
    yield Finding(
        "norm_axis",
        f"{len(names)} norms ({', '.join(names[:2])}{' ...' if len(names) > 2 else ''}) normalise over the tokens of a "
        "sequence instead of the channels of a token: every token sees all others, also later ones.",
        "Normalise over the last axis",
        measured="tokens that change when the first token of the norm's input is replaced",
        before=float(x.tokens or 0),
        after=1.0,
        intervention="expected",
        where=names[0],
    )


def _is_normed(out: Tensor, given: Tensor, axis: int) -> bool:
    """Whether the output, before its gain and shift by channel, has equal mean and variance along the tokens."""
    mean, deviation = out.double().mean(axis), out.double().std(axis, unbiased=False)
    was = given.double().std(axis, unbiased=False)
    same = float((mean - mean.mean(0)).abs().max()) < 1e-4 and float((deviation - deviation.mean(0)).abs().max()) < 1e-2
    return same and float((was - was.mean(0)).abs().max()) > 1e-2


@cause(
    proof="the smallest module with attention is given tokens that are all equal: what it returns must be equal, too, "
    "unless each token reaches all heads",
    change="view(batch, tokens, heads, size).transpose(1, 2)",
    order=14,
)
def view_for_transpose(x: Examination) -> Iterator[Finding]:
    """A view where a transpose was meant."""
    if x.tokens is None or x.tokens < 3 or x.batch.inputs or x.softmaxes.wrong():
        return
    wrong = []
    for call in _attention_modules(x):
        assert call.given is not None
        axis = x.token_axis(call.given)
        if axis is None:
            continue
        # One token fewer: if the number of heads divides that of tokens, equal tokens stay equal in a wrong view, too.
        shape = list(call.given.shape)
        shape[axis] -= 1
        constant = call.given.narrow(axis, 0, 1).expand(shape).contiguous()
        with undisturbed(call.module):
            out = call.module(constant)
        out = out[0] if isinstance(out, tuple) else out
        if out.shape != constant.shape:
            continue
        rows = out.movedim(axis, 0)
        gap = changed_entries(rows[:1].expand_as(rows), rows)
        if gap is not None and bool(gap.any()) and _tokens_reach_different_heads(call, axis):
            wrong.append((call, float((rows - rows[:1]).double().norm() / rows.double().norm())))
    if not wrong:
        return
    call, size = wrong[0]
    yield Finding(
        "view_for_transpose",
        f"Attention mixes heads with tokens in {len(wrong)} modules (first {call.name}): given equal tokens, it "
        "returns different ones, which no attention can do. Usually a view(batch, heads, tokens, size) where a "
        "transpose was meant.",
        "View as (batch, tokens, heads, size) and transpose heads and tokens, and do the same backwards at the end",
        measured="difference between the outputs of equal tokens",
        before=size,
        after=0.0,
        intervention="expected of any attention",
        where=call.name or "",
    )


def _tokens_reach_different_heads(call: ModuleCall, axis: int) -> bool:
    """Whether tokens that are next to each other change one part of the output, and others another part.

    Every attention carries every token into all heads, also one that rotates values by their position, which returns
    different tokens for equal ones. Where heads and tokens are mixed, a token lies in one head or two: its head is
    some channels of the output, or, if heads are not transposed back, some of its tokens.
    """
    assert call.given is not None
    if call.given.ndim != 3:
        return False
    rows = call.given.movedim(axis, 0)[:, :1]
    tokens, _, width = rows.shape
    rows = rows.expand(-1, 4 * width // tokens + 1, -1)

    def change(token: int) -> Tensor:
        """What other values of one token change, with the tokens of the output first."""
        moved = rows.clone()
        moved[token] += torch.randn_like(moved[token])
        with undisturbed(call.module):
            before, after = (call.module(value.movedim(0, axis)) for value in (rows, moved))
        if isinstance(before, tuple):
            before, after = before[0], after[0]
        changed: Tensor = (after - before).double().movedim(axis, 0)
        return changed

    first, second, middle = change(0), change(1), change(tokens // 2)
    if not (bool(first.any()) and bool(second.any()) and bool(middle.any())):
        return False
    last = [int(one.flatten(1).abs().amax(1).nonzero().max()) for one in (first, second, middle)]
    if last[0] == last[1] < last[2]:
        return True
    # The directions of the channels that the first token reaches, and what of the other changes lies outside them.
    _, sizes, directions = torch.linalg.svd(first.flatten(0, 1), full_matrices=False)
    reached = directions[sizes > 1e-3 * sizes[0]]
    other = middle.flatten(0, 1)
    return float((other - other @ reached.T @ reached).norm()) > 0.25 * float(other.norm())


def _has_softmax(call: ModuleCall) -> bool:
    mode = Softmaxes()
    assert call.given is not None
    try:
        with undisturbed(call.module), mode:
            call.module(call.given)
    except (TypeError, RuntimeError):
        return False
    return bool(mode.calls)


def _inside(inner: nn.Module, outer: nn.Module) -> bool:
    return inner is not outer and any(module is inner for module in outer.modules())
