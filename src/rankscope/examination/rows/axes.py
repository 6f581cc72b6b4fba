"""Operations along the wrong axis, masks and padding: what sees what."""

from __future__ import annotations

from torch import nn

from rankscope.examination import source
from rankscope.examination.experiments.changes import attention_seen
from rankscope.examination.experiments.dependencies import next_tokens_of, turned_first
from rankscope.examination.experiments.weights import attention_softmax
from rankscope.examination.findings import NOT_MADE, CarriedOut
from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import CLASSIFIER, DECODER, ENCODER, MASKED
from rankscope.examination.spec import Finding, finding, row


@row(
    "sequences_touch",
    order=11,
    good=CLASSIFIER.but(
        "nn.Linear(16, 16)", "nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)",
        "x = x + self.mix(x).tanh()", "x = self.mix(x)",
    ),
    fault=(", batch_first=True", ""),
)  # fmt: skip
def sequences_mix(x: Examination, touch: Outcome) -> Finding:
    """Sequences that influence each other."""
    size, where, made, why, after = touch["size"], touch["where"], NOT_MADE, "", None
    over_batch = [one for one in x.scan.calls if one.axis == x.batch.axis and one.shape[one.axis] == x.sequences]
    turned = turned_first(x, touch["keep"], touch["axis"])
    if turned is not None and turned < 1e-3 * size:
        kinds = {type(module) for module in x.model.modules()}
        layers: tuple[type[nn.Module], ...] = (nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
        outer = [kind for kind in layers if kind in kinds]
        outer = outer or [type(one) for one in x.model.modules() if hasattr(one, "batch_first")]
        made, after = CarriedOut(f"Pass `batch_first=True` to `nn.{outer[0].__name__}`"), turned
    elif over_batch:
        place = over_batch[0].place
        made = x.edited("sequences_touch", place, source.over_axis, -1)
        why = ": the first axis counts sequences, the last one keys"
    return finding(
        f"Sequences of a batch influence each other: another second sequence changes the output of the others, first "
        f"in {where or 'the model itself'}.",
        "Look for view or reshape where a transpose was meant, or for an operation along the first axis",
        made,
        why=why,
        evidence=("change of the other sequences' output", size, after, "with batch_first=True"),
        where=where,
    )


@row("place_counts", order=11, good=DECODER, fault=("self.place[: ids.shape[1]]", "self.place[: len(ids), None]"))
def positions_by_sequence(x: Examination, counts: Outcome) -> Finding:
    """Positions that count sequences."""
    rows = counts["rows"].double()
    return finding(
        "The same sequence gets another output in another place of the batch: something depends on the place in the "
        "batch, such as positions that are added along the batch axis.",
        "Look at the axis by which positions are indexed: it has to count tokens",
        evidence=(
            "difference between the outputs of equal sequences",
            float((rows - rows.mean(0)).norm() / rows.norm()),
        ),
    )


_HEADS = {
    "heads for tokens": "attention is computed between the heads of each token instead of between the tokens of each "
    "head, so that no token sees another",
    "split": "heads are split by a view where a transpose was meant, so that a head sees parts of {tokens} tokens",
    "merge": "heads are merged without the transpose back, so that a token holds parts of {tokens} tokens",
}


@row(
    "heads_mixed",
    order=13,
    good=DECODER,
    fault=("one.view(size, tokens, 4, 8).transpose(1, 2)", "one.reshape(size, 4, tokens, 8)"),
)
def view_for_transpose(x: Examination, mixed: Outcome) -> Finding:
    """A view where a transpose was meant."""
    first = mixed["mixed"][0]
    where = f" in `{first.place.name}`" if first.place is not None else ""
    return finding(
        f"Attention mixes heads with tokens{where}: {_HEADS[first.how].format(tokens=first.tokens)}.",
        "View as (batch, tokens, heads, size) and transpose heads and tokens before the product of queries and keys, "
        "and do the same backwards before the output projection",
        evidence=("tokens whose numbers are in one head, or in one token after it", float(first.tokens)),
    )


@row("weights_off_one", order=14, good=DECODER, fault=("softmax(-1)", "softmax(-2)"))
def softmax_axis(x: Examination, off: Outcome) -> Finding:
    """A softmax over another axis than the keys, or a mask after it."""
    wrong = off["wrong"]
    masked = [one for one in wrong if one.cleared > 0]
    if masked:
        place, after = masked[0].softmax.place, x.scan.filled_after
        made = x.edited("weights_off_one", place, source.masked_before, after[0] if after else None)
        share = max(one.cleared for one in masked)
        why = f"the mask is applied after the softmax, and sets {share:.0%} of them to zero."
        hint = "Mask the scores before the softmax"
    else:
        place = wrong[0].softmax.place
        made = x.edited("weights_off_one", place, source.over_axis, wrong[0].summed)
        why = "the softmax runs over another axis than the keys."
        hint = "Take the softmax over the axis that counts keys, usually the last one"
    return finding(
        f"The weights of attention do not sum to one in {len(wrong)} products: {why}",
        hint,
        made,
        evidence=("largest distance of the sum of a token's weights from one", max(one.axis for one in wrong)),
    )


@row(
    "softmax_of_one",
    order=14,
    good=CLASSIFIER.but(
        "nn.Linear(16, 16)", "nn.Linear(16, 1)",
        "        x = x + self.mix(x).tanh()\n", "        weights = self.mix(x).softmax(1)\n",
        "x.mean(1)", "(weights * x).sum(1)",
    ),
    fault=("softmax(1)", "softmax(-1)"),
)  # fmt: skip
def softmax_over_one(x: Examination, single: Outcome) -> Finding:
    """A softmax over an axis of one entry, which makes all weights 1."""
    call, axis, silent = single["call"], single["axis"], single["names"]
    return finding(
        f"A softmax runs over an axis of one entry (shape {call.shape}), so that all its weights are 1, whatever the "
        f"scores; {silent[0]} and {len(silent) - 1} more parameters get no gradient.",
        f"Take the softmax over axis {axis}, over the {x.tokens} tokens",
        x.edited("softmax_of_one", call.place, source.over_axis, axis),
        why=f", over the {x.tokens} tokens",
        certainty="possible",  # a single key is legitimate, and has the same effect
        evidence=("parameters whose gradient is zero", float(len(silent))),
    )


_NORM = """\
class Norm(nn.Module):
    def forward(self, x):
        return (x - x.mean(-1, keepdim=True)) / x.var(-1, keepdim=True).sqrt()


class Model("""


@row(
    "norm_over_tokens",
    order=14,
    good=DECODER.but("class Model(", _NORM, "self.norm, self.head = nn.LayerNorm(32)", "self.norm, self.head = Norm()"),
    fault=("x.mean(-1, keepdim=True)) / x.var(-1,", "x.mean(1, keepdim=True)) / x.var(1,"),
)
def norm_axis(x: Examination, over: Outcome) -> Finding:
    """A norm along the tokens."""
    names = over["names"]
    return finding(
        f"{len(names)} norms ({', '.join(names[:2])}{' ...' if len(names) > 2 else ''}) normalise over the tokens of a "
        "sequence instead of the channels of a token: every token sees all others, also later ones.",
        "Normalise over the last axis",
        evidence=("tokens that change when the first token of the norm's input is replaced", float(x.tokens or 0)),
        where=names[0],
    )


@row("reaches_earlier", order=15, good=DECODER, fault=("scores = scores.masked_fill", "scores.masked_fill"))
def causal_mask(x: Examination, reach: Outcome) -> Finding | None:
    """A causal mask that is missing, inverted or off by one."""
    if any(x.outcome(name).seen for name in ("weights_off_one", "heads_mixed", "norm_over_tokens")):
        return None  # these carry a change to other tokens, whatever the mask
    earlier, later, whole = reach["earlier"], reach["later"], reach["later"] == reach["all later"]
    words = f"replacing token {reach['middle']} changes the output at {earlier} earlier tokens"
    language = next_tokens_of(x) is not None
    hint = "Give attention a causal mask, or look at what this module does over tokens"
    if reach["near"] and whole and earlier <= (1 if x.stack is None else x.stack.depth):
        # Every later token sees the replaced one; a window around it, which is no causal mask, ends.
        sentence = f"The causal mask is off by one: {words}: a token sees the next one"
        sentence += ", which it has to predict." if language else "."
        hint = "The mask must hide the first token after each query, too"
    elif earlier > 1 and not later:
        sentence = f"The causal mask is inverted: {words} and at no later one."
        hint = f"Invert the mask: {SIGNS}"
    elif earlier and later and language:
        ahead = [one.ahead for one in x.once(attention_seen) if one.ahead is not None]
        share = sum(ahead) / len(ahead) if ahead else 0.0
        where = f", first in {reach['where']}" if reach["where"] else ""
        sentence = f"The model sees the tokens it has to predict: the labels are the next tokens, and {words}{where}. "
        sentence += (
            f"The causal mask is inverted: {share:.0%} of the attention lies on later tokens."
            if share > TURNED
            else "There is no causal mask, or it has no effect."
        )
    else:
        return None
    made, why = _with_mask(x)
    return finding(
        sentence,
        hint,
        made,
        why=why,
        evidence=("earlier tokens whose output changes when a token is replaced", float(earlier)),
        where=reach["where"],
    )


TURNED = 0.75
"""Share of attention on later tokens from which on a causal mask is inverted; without a mask it is below a half."""
SIGNS = "for key_padding_mask and attn_mask True hides a key, for F.scaled_dot_product_attention True shows it"


def _with_mask(x: Examination) -> tuple[CarriedOut, str]:
    """The edit that makes attention causal, if attention is written in one place that can be quoted, and why."""
    if x.scan.again:
        place = x.scan.again[0].place
        made = x.edited("reaches_earlier", place, source.without_call, "softmax")
        return made, ": a second softmax gives the hidden tokens a weight again"
    square = {place for shape, place in x.scan.fills if shape[-2:] == (x.tokens, x.tokens)}
    softmax = attention_softmax(x)
    if len(square) > 1 or softmax is None:
        return NOT_MADE, ""
    filling = next(iter(square), None)
    return x.edited("reaches_earlier", filling or softmax, source.causal, filling), ""


@row("padding_seen", order=14, good=MASKED, fault=("attention_mask[:, None] == 0", "attention_mask[:, None] == 1"))
def padding_attended(x: Examination, seen: Outcome) -> Finding:
    """Padding that is attended to."""
    found = seen["mask"]
    name, mask = found.name, found.value
    kind = "a float mask is added to the scores and hides nothing" if mask.is_floating_point() else "it has no effect"
    value = (mask.T if found.turned else mask)[found.hidden][0]
    dropped = [place for _, place in x.scan.fills if source.fitting(source.kept_result, place)]
    if dropped:
        made, why = x.edited("padding_seen", dropped[0], source.kept_result), ": masked_fill does not work in place"
    else:
        names, new = ("src_key_padding_mask", "key_padding_mask"), f"({name} == {value.item():g})"
        place = source.reading(x.model, name)
        made = x.edited("padding_seen", place, source.with_argument, names, new)
        why = ": True hides a token, a float does not"
    return finding(
        f"Padding is attended to: other values at the padded tokens change the output ({kind}, or has the other sign).",
        f"Pass a boolean mask of the sign that the module documents: {SIGNS}",
        made,
        why=why,
        evidence=("change of the output at other tokens when padding is replaced", seen["size"]),
        where=name,
    )


@row(
    "padding_alone",
    order=14,
    good=ENCODER.but(
        "nn.ModuleList(Layer() for _ in range(2))",
        "nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True) for _ in range(2))",
        "x = layer(x)", "x = layer(x, src_key_padding_mask=ids == 0)",
        "inputs, labels =", "text[torch.arange(12) >= torch.arange(4, 10).repeat(2)[:, None]] = 0\ninputs, labels =",
    ),
    fault=("ids == 0", "ids != 0"),
)  # fmt: skip
def padding_alone_seen(x: Examination, alone: Outcome) -> Finding:
    """Attention of which all weights lie on padding."""
    return finding(
        f"Padding is all that attention sees: all its weights lie on the tokens with the id {alone['id']} that fill "
        "the ends of sequences, and none on the others. The padding mask has the wrong sign.",
        f"Invert the mask: {SIGNS}",
    )
