"""Operations along the wrong axis, masks and padding: what sees what."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rankscope.examination import source
from rankscope.examination.experiments.changes import attention_seen
from rankscope.examination.experiments.dependencies import next_tokens_of, turned_first
from rankscope.examination.experiments.weights import attention_softmax
from rankscope.examination.findings import FileEdit
from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import Classifier, Program, classes, decoder, ids, per_token
from rankscope.examination.spec import Finding, row


class _Sequences(nn.Module):
    """A layer that takes tokens first unless it is told otherwise."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 3)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=batch_first)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.layer(self.embed(ids)).mean(1))
        return out


@row(
    reads=("sequences_touch",),
    order=11,
    bad=lambda: Program(_Sequences(False), ids(), classes()),
    good=lambda: Program(_Sequences(True), ids(), classes()),
)
def sequences_mix(x: Examination, touch: Outcome) -> Finding:
    """Sequences that influence each other."""
    size, where, after, intervention = touch["size"], touch["where"], 0.0, "expected"
    edits: tuple[FileEdit, ...] = ()
    over_batch = [one for one in x.scan.calls if one.axis == x.batch.axis and one.shape[one.axis] == x.sequences]
    change = ""
    turned = turned_first(x, touch["keep"], touch["axis"])
    if turned is not None and turned < 1e-3 * size:
        kinds = {type(module) for module in x.model.modules()}
        layers: tuple[type[nn.Module], ...] = (nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        outer = [kind for kind in layers if kind in kinds]
        outer = outer or [type(one) for one in x.model.modules() if hasattr(one, "batch_first")]
        change = f"Pass `batch_first=True` to `nn.{outer[0].__name__}`"
        after, intervention = turned, "with batch_first=True"
    elif over_batch:
        place = over_batch[0].place
        change, edits = x.edited("sequences_touch", place, source.over_axis(place, -1))
        change = change and f"{change}: the first axis counts sequences, the last one keys"
    return Finding(
        "sequences_mix",
        f"Sequences of a batch influence each other: another second sequence changes the output of the others, first "
        f"in {where or 'the model itself'}.",
        change or "Look for view or reshape where a transpose was meant, or for an operation along the first axis",
        tried=bool(change),
        measured="change of the other sequences' output",
        before=size,
        after=after,
        intervention=intervention,
        where=where,
        edits=edits,
    )


class _Placed(Classifier):
    def __init__(self, by_sequence: bool) -> None:
        super().__init__()
        self.place, self.by_sequence = nn.Parameter(torch.randn(16, 16)), by_sequence

    def forward(self, ids: Tensor) -> Tensor:
        place = self.place[: len(ids), None] if self.by_sequence else self.place[: ids.shape[1]]
        x = self.embed(ids) + place
        out: Tensor = self.head(self.mix(x).tanh().mean(1))
        return out


@row(
    reads=("place_counts",),
    order=11,
    bad=lambda: Program(_Placed(True), ids(), classes()),
    good=lambda: Program(_Placed(False), ids(), classes()),
)
def positions_by_sequence(x: Examination, counts: Outcome) -> Finding:
    """Positions that count sequences."""
    rows = counts["rows"].double()
    return Finding(
        "positions_by_sequence",
        "The same sequence gets another output in another place of the batch: something depends on the place in the "
        "batch, such as positions that are added along the batch axis.",
        "Look at the axis by which positions are indexed: it has to count tokens",
        measured="difference between the outputs of equal sequences",
        before=float((rows - rows.mean(0)).norm() / rows.norm()),
        after=0.0,
        intervention="expected",
    )


_HEADS = {
    "heads for tokens": "attention is computed between the heads of each token instead of between the tokens of each "
    "head, so that no token sees another",
    "split": "heads are split by a view where a transpose was meant, so that a head sees parts of {tokens} tokens",
    "merge": "heads are merged without the transpose back, so that a token holds parts of {tokens} tokens",
}


@row(reads=("heads_mixed",), order=13, bad=lambda: decoder("split"), good=decoder)
def view_for_transpose(x: Examination, mixed: Outcome) -> Finding:
    """A view where a transpose was meant."""
    first = mixed["mixed"][0]
    where = f" in `{first.place.name}`" if first.place is not None else ""
    return Finding(
        "view_for_transpose",
        f"Attention mixes heads with tokens{where}: {_HEADS[first.how].format(tokens=first.tokens)}.",
        "View as (batch, tokens, heads, size) and transpose heads and tokens before the product of queries and keys, "
        "and do the same backwards before the output projection",
        measured="tokens whose numbers are in one head, or in one token after it",
        before=float(first.tokens),
        after=float(x.tokens or 0) if first.how != "merge" else 1.0,
        intervention="expected of any attention",
    )


@row(reads=("weights_off_one",), order=14, bad=lambda: decoder("queries"), good=decoder)
def softmax_axis(x: Examination, off: Outcome) -> Finding:
    """A softmax over another axis than the keys, or a mask after it."""
    wrong = off["wrong"]
    masked = [one for one in wrong if one.cleared > 0]
    if masked:
        place, after = masked[0].softmax.place, x.scan.filled_after
        edits = source.masked_before(place, after[0] if after else None)
        why = (
            f"the mask is applied after the softmax, and sets {max(one.cleared for one in masked):.0%} of them to zero."
        )
        general = "Mask the scores before the softmax"
    else:
        place = wrong[0].softmax.place
        edits = source.over_axis(place, wrong[0].summed)
        why = "the softmax runs over another axis than the keys."
        general = "Take the softmax over the axis that counts keys, usually the last one"
    change, written = x.edited("weights_off_one", place, edits)
    return Finding(
        "softmax_axis",
        f"The weights of attention do not sum to one in {len(wrong)} products: {why}",
        change or general,
        tried=bool(change),
        measured="largest distance of the sum of a token's weights from one",
        before=max(one.axis for one in wrong),
        after=0.0,
        intervention="expected of any attention",
        edits=written,
    )


class _Pooling(Classifier):
    def __init__(self, axis: int) -> None:
        super().__init__()
        self.score, self.axis = nn.Linear(16, 1), axis

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        weights = self.score(x).softmax(self.axis)
        out: Tensor = self.head((weights * x).sum(1))
        return out


@row(
    reads=("softmax_of_one",),
    order=14,
    bad=lambda: Program(_Pooling(-1), ids(), classes()),
    good=lambda: Program(_Pooling(1), ids(), classes()),
)
def softmax_over_one(x: Examination, single: Outcome) -> Finding:
    """A softmax over an axis of one entry, which makes all weights 1."""
    call, axis, silent = single["call"], single["axis"], single["names"]
    change, edits = x.edited("softmax_of_one", call.place, source.over_axis(call.place, axis))
    return Finding(
        "softmax_over_one",
        f"A softmax runs over an axis of one entry (shape {call.shape}), so that all its weights are 1, whatever the "
        f"scores; {silent[0]} and {len(silent) - 1} more parameters get no gradient.",
        f"{change or f'Take the softmax over axis {axis}'}, over the {x.tokens} tokens",
        tried=bool(change),
        certainty="possible",  # a single key is legitimate, and has the same effect
        measured="parameters whose gradient is zero",
        before=float(len(silent)),
        edits=edits,
    )


class _Normed(nn.Module):
    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(self.axis, keepdim=True)) / (x.std(self.axis, keepdim=True) + 1e-5)


def _normed(axis: int) -> Program:
    """A decoder with a norm of one's own."""
    program = decoder()
    program.model.norm = _Normed(axis)
    return program


@row(reads=("norm_over_tokens",), order=14, bad=lambda: _normed(1), good=lambda: _normed(-1))
def norm_axis(x: Examination, over: Outcome) -> Finding:
    """A norm along the tokens."""
    names = over["names"]
    return Finding(
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


@row(reads=("reaches_earlier",), order=15, bad=lambda: decoder("unmasked"), good=decoder)
def causal_mask(x: Examination, reach: Outcome) -> Finding | None:
    """A causal mask that is missing, inverted or off by one."""
    if any(x.outcome(name).seen for name in ("weights_off_one", "heads_mixed", "norm_over_tokens")):
        return None  # these carry a change to other tokens, whatever the mask
    earlier, later, whole = reach["earlier"], reach["later"], reach["later"] == reach["all later"]
    words = f"replacing token {reach['middle']} changes the output at"
    language = next_tokens_of(x) is not None
    hint, after = (
        "Give attention a causal mask, or look at what this module does over tokens",
        "expected of a causal model",
    )
    if reach["near"] and whole and earlier <= (1 if x.stack is None else x.stack.depth):
        # Every later token sees the replaced one; a window around it, which is no causal mask, ends.
        sentence = f"The causal mask is off by one: {words} {earlier} earlier tokens: a token sees the next one" + (
            ", which it has to predict." if language else "."
        )
        hint, after = "The mask must hide the first token after each query, too", "expected with diagonal=1"
    elif earlier > 1 and not later:
        sentence = f"The causal mask is inverted: {words} {earlier} earlier tokens and at no later one."
        hint, after = (
            "Invert the mask: for nn.MultiheadAttention True hides a key, for F.scaled_dot_product_attention True "
            "shows it",
            "expected of a causal model",
        )
    elif earlier and later and language:
        ahead = [one.ahead for one in x.once(attention_seen) if one.ahead is not None]
        share = sum(ahead) / len(ahead) if ahead else 0.0
        sentence = (
            "The model sees the tokens it has to predict: the labels are the next tokens, and "
            f"{words} {earlier} earlier tokens"
            + (f", first in {reach['where']}. " if reach["where"] else ". ")
            + (
                f"The causal mask is inverted: {share:.0%} of the attention lies on later tokens."
                if share > TURNED
                else "There is no causal mask, or it has no effect."
            )
        )
    else:
        return None
    change, edits = _with_mask(x)
    return Finding(
        "causal_mask",
        sentence,
        change or hint,
        tried=bool(change),
        measured="earlier tokens whose output changes when a token is replaced",
        before=float(earlier),
        after=0.0,
        intervention=after,
        where=reach["where"],
        edits=edits,
    )


TURNED = 0.75
"""Share of attention on later tokens from which on a causal mask is inverted; without a mask it is below a half."""


def _with_mask(x: Examination) -> tuple[str, tuple[FileEdit, ...]]:
    """The edit that makes attention causal; empty if it is not written in one place that can be quoted."""
    seen = x.scan
    if seen.again:
        place = seen.again[0].place
        change, edits = x.edited("reaches_earlier", place, source.without_call(place, "softmax"))
        return change and f"{change}: a second softmax gives the hidden tokens a weight again", edits
    square = {place for shape, place in seen.fills if shape[-2:] == (x.tokens, x.tokens)}
    softmax = attention_softmax(x)
    if len(square) > 1 or softmax is None:
        return "", ()
    filling = next(iter(square), None)
    return x.edited("reaches_earlier", filling or softmax, source.causal(softmax, filling))


class _Padded(nn.Module):
    def __init__(self, sign: int) -> None:
        super().__init__()
        self.embed, self.head, self.sign = nn.Embedding(20, 32), nn.Linear(32, 20), sign

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(ids)
        hidden = attention_mask == self.sign
        scores = (x @ x.transpose(1, 2)).masked_fill(hidden[:, None], -1e9)
        out: Tensor = self.head(scores.softmax(-1) @ x)
        return out


def _padded(sign: int) -> Program:
    """Texts with padding, and a mask that marks it with 0."""
    mask = (torch.arange(12) < torch.arange(4, 10).repeat(2)[:, None]).long()
    text = ids(12, 12)
    return Program(_Padded(sign), {"ids": text, "attention_mask": mask}, text.masked_fill(mask == 0, -100), per_token)


@row(reads=("padding_seen",), order=14, bad=lambda: _padded(1), good=lambda: _padded(0))
def padding_attended(x: Examination, seen: Outcome) -> Finding:
    """Padding that is attended to."""
    found = seen["mask"]
    name, mask = found.name, found.value
    kind = "a float mask is added to the scores and hides nothing" if mask.is_floating_point() else "it has no effect"
    value = (mask.T if found.turned else mask)[found.hidden][0]
    dropped = [place for _, place in x.scan.fills if place is not None and source.kept_result(place)]
    if dropped:
        place, edits, why = dropped[0], source.kept_result(dropped[0]), "masked_fill does not work in place"
    else:
        names = ("src_key_padding_mask", "key_padding_mask")
        place, edits = source.argument_in(x.model, names, f"({name} == {value.item():g})", name)  # type: ignore[assignment]
        why = "True hides a token, a float does not"
    change, written = x.edited("padding_seen", place, edits)
    return Finding(
        "padding_attended",
        f"The padding mask {name!r} has the wrong sign: padding is attended to, and the other tokens are not."
        if seen["inverted"]
        else f"Padding is attended to: other values at the padded tokens change the output ({kind}, or has the other "
        "sign).",
        f"{change}: {why}" if change else _SIGNS,
        tried=bool(change),
        measured="change of the output at other tokens when padding is replaced",
        before=seen["size"],
        after=0.0,
        intervention="expected with a mask that hides padding",
        where=name,
        edits=written,
    )


_SIGNS = (
    "Pass a boolean mask of the sign that the module documents: for key_padding_mask True hides a token, for "
    "F.scaled_dot_product_attention True shows it"
)


class _Inner(nn.Module):
    """Attention of torch under a mask that is made of the ids."""

    def __init__(self, sign: bool) -> None:
        super().__init__()
        self.embed, self.head, self.sign = nn.Embedding(20, 16), nn.Linear(16, 3), sign
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(self.embed(ids), src_key_padding_mask=(ids != 0) == self.sign).mean(1))
        return out


def _inner(sign: bool) -> Program:
    """Sequences of different lengths with a class each, filled with the id 0."""
    text = ids(12, 12).masked_fill(torch.arange(12) >= torch.arange(4, 10).repeat(2)[:, None], 0)
    return Program(_Inner(sign), text, classes())


@row(reads=("padding_alone",), order=14, bad=lambda: _inner(True), good=lambda: _inner(False))
def padding_alone_seen(x: Examination, alone: Outcome) -> Finding:
    """Attention of which all weights lie on padding."""
    return Finding(
        "padding_alone_seen",
        f"Padding is all that attention sees: all its weights lie on the tokens with the id {alone['id']} that fill "
        "the ends of sequences, and none on the others. The padding mask has the wrong sign.",
        "Invert the mask: for key_padding_mask True hides a token, for F.scaled_dot_product_attention True shows it",
        measured="largest weight of attention on a token that is not padding",
        before=0.0,
    )
