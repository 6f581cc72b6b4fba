"""Which tokens see which: causality and padding, by replacing tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rankscope.errors import RankscopeError
from rankscope.examination import _source
from rankscope.examination._examination import Examination
from rankscope.examination._spec import Finding, cause
from rankscope.examination._tensors import change_between, changed_entries, main_output
from rankscope.examination.axes import attention_softmax
from rankscope.models.inputs.record import is_mask_like
from rankscope.stream.attention_calls import AttentionCall


def _token_changes(x: Examination, after: Tensor | None) -> Tensor | None:
    """Which tokens of the first sequences' output changed, as a mask ``sequences tokens``."""
    if x.result is None or after is None:
        return None
    axis = x.token_axis(x.result)
    if axis is None:
        return None
    gap = changed_entries(x.result, after)
    return (
        None
        if gap is None
        else gap.movedim(axis, 1).movedim(x.sequence_axis(x.result) or 0, 0).flatten(2).any(-1)
        if axis == 1
        else gap.transpose(0, 1).flatten(2).any(-1)
    )


def next_tokens_of(x: Examination) -> Tensor | None:
    """The ids of which each output is compared with the next one; None if the loss compares something else."""
    compared = x.outcome("compared_token")
    return compared["ids"] if compared.shown and compared["distance"] == 1 else None


@cause(
    proof="one token is replaced, and the outputs at other tokens are compared",
    change="the causal mask",
    order=15,
)
def causal_mask(x: Examination) -> Iterator[Finding]:
    """A causal mask that is missing, inverted or off by one."""
    if x.result is None or x.tokens is None or x.tokens < 6 or x.sequences < 1:
        return
    middle = x.tokens // 2
    read = next_tokens_of(x)
    batch = x.changed(lambda mask: mask[:, middle].fill_(True), read)
    moved = _token_changes(x, x.output(batch))
    if moved is None:
        return
    any_row = moved.any(0)
    before, itself, after = any_row[:middle], bool(any_row[middle]), any_row[middle + 1 :]
    earlier, later = int(before.sum()), int(after.sum())
    if x.softmaxes.wrong():
        return  # weights that sum to one over queries carry a change to every token, whatever the mask
    words = f"replacing token {middle} changes the output at"
    language = read is not None
    change = ""
    if earlier or not itself:
        change = _with_mask(x)
    # Each block reaches one token further, so a mask that is off by one reaches as many earlier tokens as blocks.
    reach = 1 if x.stack is None else x.stack.depth
    # Every later token sees the replaced one; a window around it, which is no causal mask, ends.
    if later == len(after) and 0 < earlier <= reach < middle and bool(before[-earlier:].all()):
        yield Finding(
            "causal_mask",
            f"The causal mask is off by one: {words} {earlier} earlier tokens: a token sees the next one"
            + (", which it has to predict." if language else "."),
            change or "The mask must hide the first token after each query, too",
            tried=bool(change),
            measured="earlier tokens whose output changes when a token is replaced",
            before=float(earlier),
            after=0.0,
            intervention="expected with diagonal=1",
        )
    elif earlier and not later and earlier > 1:
        yield Finding(
            "causal_mask",
            f"The causal mask is inverted: {words} {earlier} earlier tokens and at no later one.",
            change
            or "Invert the mask: for nn.MultiheadAttention True hides a key, for F.scaled_dot_product_attention True "
            "shows it",
            tried=bool(change),
            measured="earlier and later tokens whose output changes when a token is replaced",
            before=float(earlier),
            after=0.0,
            intervention="expected of a causal model",
        )
    elif earlier and later and language:
        ahead = _share_on_later_tokens(x)
        yield Finding(
            "causal_mask",
            f"The model sees the tokens it has to predict: the labels are the next tokens, and {words} {earlier} "
            "earlier tokens. "
            + (
                "There is no causal mask, or it has no effect."
                if ahead is None or ahead < TURNED
                else f"The causal mask is inverted: {ahead:.0%} of the attention lies on later tokens."
            ),
            change or "Give attention a causal mask",
            tried=bool(change),
            measured="earlier tokens whose output changes when a token is replaced",
            before=float(earlier),
            after=0.0,
            intervention="expected with a causal mask",
        )
    elif not itself and later == len(after):  # fewer are rounding, as in a model whose tokens are all alike
        yield Finding(
            "causal_mask",
            f"A token does not see itself: {words} later tokens only; the mask hides the diagonal.",
            change or "The mask must leave the token itself visible",
            tried=bool(change),
            certainty="possible",
            measured="later tokens whose output changes when a token is replaced",
            before=float(later),
        )


TURNED = 0.75
"""Share of attention on later tokens from which on a causal mask is inverted; without a mask it is below a half."""


def _share_on_later_tokens(x: Examination) -> float | None:
    """The share of attention that lies on later tokens, of the tokens that have one; None if it cannot be seen."""
    shares: list[float] = []

    def see(call: AttentionCall, _: object) -> None:
        probs = call.probs().detach().double()
        if probs.shape[-1] == probs.shape[-2] == x.tokens:
            shares.append(float(probs.triu(1)[..., :-1, :].sum() / probs[..., :-1, :].sum()))

    try:
        x.see_attention(see)
    except (RankscopeError, RuntimeError):
        return None
    return sum(shares) / len(shares) if shares else None


def _with_mask(x: Examination) -> str:
    """The edit that makes attention causal; empty if it is not written in one place that can be quoted."""
    seen = x.softmaxes
    if seen.again:
        place = seen.again[0].place
        change = x.edited(causal_mask, place, _source.without_call(place, "softmax"))
        return change and f"{change}: a second softmax gives the hidden tokens a weight again"
    square = {place for shape, place in seen.fills if shape[-2:] == (x.tokens, x.tokens)}
    softmax = attention_softmax(x)
    if len(square) > 1 or softmax is None:
        return ""
    filling = next(iter(square), None)
    return x.edited(causal_mask, filling or softmax, _source.causal(softmax, filling))


@cause(
    proof="the padded tokens are replaced, then the others; the outputs are compared",
    change="a boolean mask of the sign that the module documents",
    order=14,
)
def padding_attended(x: Examination) -> Iterator[Finding]:
    """Padding that is attended to, or that alone is."""
    yield from _only_padding_seen(x)
    if x.result is None or x.tokens is None:
        return
    masks = {
        name: value
        for name, value in x.batch.inputs.items()
        if isinstance(value, Tensor) and is_mask_like(name) and value.ndim == 2 and len(torch.unique(value)) == 2
    }
    if len(masks) != 1:
        return
    ((name, mask),) = masks.items()
    rows = mask if mask.shape == (x.sequences, x.tokens) else mask.T
    if rows.shape != (x.sequences, x.tokens):
        return
    padded = _padded_side(rows)
    if padded is None:
        return

    def replaced_output(where: Tensor) -> Tensor | None:
        return main_output(x.run(x.changed(lambda chosen: chosen.copy_(where.to(chosen.device)))))

    other_padding = replaced_output(padded)
    alone = x.token_axis(x.result)
    if other_padding is None:
        return
    before, after = x.result, other_padding
    if alone is not None:
        seen = ~padded
        before, after = (t.transpose(0, 1)[seen] if alone == 0 else t[seen] for t in (before, after))
    gap = changed_entries(before, after)
    if gap is None or not bool(gap.any()):
        return
    content = (~padded).clone()
    content[:, 0] = False
    other_content = replaced_output(content)
    kept = None if other_content is None else change_between(x.result, other_content)
    inverted = kept is not None and alone is None and kept < 1e-6
    size = change_between(before, after)
    kind = "a float mask is added to the scores and hides nothing" if mask.is_floating_point() else "it has no effect"
    sentence = (
        f"The padding mask {name!r} has the wrong sign: padding is attended to, and the other tokens are not."
        if inverted
        else f"Padding is attended to: other values at the padded tokens change the output ({kind}, or has the other "
        "sign)."
    )
    value = mask.T[padded][0] if rows is not mask else mask[padded][0]
    dropped = [place for _, place in x.softmaxes.fills if place is not None and _source.kept_result(place)]
    if dropped:
        change, why = (
            x.edited(padding_attended, dropped[0], _source.kept_result(dropped[0])),
            "masked_fill does not work in place",
        )
    else:
        names = ("src_key_padding_mask", "key_padding_mask")
        change = x.edited(padding_attended, *_source.argument_in(x.model, names, f"({name} == {value.item():g})", name))
        why = "True hides a token, a float does not"
    yield Finding(
        "padding_attended",
        sentence,
        f"{change}: {why}"
        if change
        else "Pass a boolean mask of the sign that the module documents: for key_padding_mask True hides a token, for "
        "F.scaled_dot_product_attention True shows it",
        tried=bool(change),
        measured="change of the output at other tokens when padding is replaced",
        before=size,
        after=0.0,
        intervention="expected with a mask that hides padding",
        where=name,
    )


def _only_padding_seen(x: Examination) -> Iterator[Finding]:
    """Attention of which all weights lie on the one id that fills the ends of sequences."""
    ids = [value.transpose(0, x.batch.axis) for value in x.mains if not value.is_floating_point() and value.ndim == 2]
    if len(ids) != 1 or x.view is None:
        return
    ends = [ids[0] == value for value in torch.unique(ids[0][:, -1])]
    # A filling that begins anywhere but at the first token, in most sequences, and that nothing follows.
    padding = [
        one
        for one in ends
        if torch.equal(one.cummax(1).values, one) and not one[:, 0].any() and 2 * one[:, -2].sum() > len(one)
    ]
    if len(padding) != 1:
        return
    rows = padding[0][:, -1]
    hidden = padding[0][rows]
    others: list[float] = []

    def see(call: AttentionCall, _: object) -> None:
        probs = call.probs().detach()
        if probs.ndim == 4 and probs.shape[0] == len(rows) and probs.shape[-1] == hidden.shape[1]:
            others.append(float(probs[rows].masked_fill(hidden[:, None, None], 0.0).max()))

    x.see_attention(see)
    if not others or max(others) > 0.0:
        return
    filling = int(ids[0][rows][0, -1])
    yield Finding(
        "padding_attended",
        f"Padding is all that attention sees: all its weights lie on the tokens with the id {filling} that "
        "fill the ends of sequences, and none on the others. The padding mask has the wrong sign.",
        "Invert the mask: for key_padding_mask True hides a token, for F.scaled_dot_product_attention True shows it",
        measured="largest weight of attention on a token that is not padding",
        before=0.0,
    )


def _padded_side(rows: Tensor) -> Tensor | None:
    """True at padding: the value that fills the ends of sequences, and never their first token."""
    for value in torch.unique(rows).tolist():
        side: Tensor = rows == value
        ends = side.int().cummax(1).values == side.int()
        if bool(ends.all()) and not bool(side[:, 0].any()) and bool(side.any()):
            return side
    return None
