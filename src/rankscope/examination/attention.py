"""Attention that is one-hot or uniform, and the scale of its scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rankscope._citations import Cite
from rankscope.errors import RankscopeError
from rankscope.examination import _source
from rankscope.examination._examination import AttentionSeen, Examination
from rankscope.examination._spec import Finding, Look, cause
from rankscope.examination._tensors import redrawn
from rankscope.examination.axes import attention_softmax
from rankscope.remedies import applied
from rankscope.stream.viewing import with_proven_cuts
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation

ENTROPY = "relative entropy of attention, mean over heads (0 one-hot, 1 uniform)"
ONE_HOT = 0.1
FLAT = 2e-3


def _entropy(seen: Mapping[int, AttentionSeen]) -> float:
    values = [float(one.entropy.mean()) for one in seen.values() if len(one.entropy)]
    return sum(values) / len(values) if values else float("nan")


def _mean_spread(seen: Mapping[int, AttentionSeen]) -> float:
    values = [float(one.spread.mean()) for one in seen.values() if len(one.spread)]
    return sum(values) / len(values) if values else float("nan")


@cause(
    proof="the scores are divided by the square root of the width of a head, or queries and keys are normalised",
    change="1 / sqrt(width of a head), or qk-norm",
    order=35,
    needs={"structure"},
    cites=(Cite("zhai2023stabilizing"),),
)
def saturated_attention(x: Examination) -> Iterator[Finding]:
    """Attention that is one-hot in most heads."""
    before = _entropy(x.attention)
    if not before < ONE_HOT or x.view is None:
        return
    view = with_proven_cuts(x.view)
    largest = max(one.largest for one in x.attention.values())
    width = _head_width(x)
    if width is not None:
        with operating(x.model, Operation(temperature=width**0.5), view=view):
            scaled = _entropy(x.attention_under())
        if scaled > 0.3:
            change = _scaled(x, saturated_attention, width)
            yield Finding(
                "missing_scale",
                f"The scores of attention are not divided by sqrt(width of a head): they reach {largest:.0f}, and the "
                "softmax picks one key.",
                change or f"Divide the product of queries and keys by the square root of {width}",
                tried=bool(change),
                measured=ENTROPY,
                before=before,
                after=scaled,
                intervention=f"with scores divided by sqrt({width})",
            )
            return
    try:
        with applied(x.model, "qk_norm", view=view):
            after = _entropy(x.attention_under())
    except RankscopeError:
        with operating(x.model, Operation(temperature=max(largest / 4, 1.0)), view=view):
            after = _entropy(x.attention_under())
    yield Finding(
        "saturated_attention",
        f"Attention picks a single key in nearly every row: scores reach {largest:.0f}. Its gradient vanishes, and "
        "small changes of the weights flip it.",
        "Normalise queries and keys before their product (qk-norm)",
        certainty="shown" if after > 0.3 else "possible",
        measured=ENTROPY,
        before=before,
        after=after,
        intervention="with normalised queries and keys",
    )


@cause(
    proof="see saturated_attention",
    change="scores / sqrt(width of a head)",
    order=36,
    needs={"structure"},
)
def missing_scale(x: Examination) -> Iterator[Finding]:
    """Scores of attention that are not scaled."""
    yield from ()


def _scaled(x: Examination, look: Look, width: int) -> str:
    softmax = attention_softmax(x)
    return x.edited(look, softmax, _source.scaled_once(softmax, width))


def _head_width(x: Examination) -> int | None:
    """Width of a head, from the width of the stream and the number of heads."""
    if not x.plain_states or not x.attention:
        return None
    heads = {len(one.entropy) for one in x.attention.values() if len(one.entropy)}
    widths = {one.shape[-1] for one in x.plain_states}
    if len(heads) != 1 or len(widths) != 1:
        return None
    width, count = widths.pop(), heads.pop()
    return width // count if width % count == 0 else None


@cause(
    proof="the scores are multiplied by what a second division by the width of a head would have taken away",
    change="one division by sqrt(width of a head)",
    order=36,
    needs={"structure"},
)
def doubled_scale(x: Examination) -> Iterator[Finding]:
    """Attention that is uniform whatever queries and keys say."""
    spread = _mean_spread(x.attention)
    width = _head_width(x)
    if not spread < FLAT or x.view is None or width is None:
        return
    # Small matrices or embeddings, as at many initialisations, give the same numbers: with weights as torch draws them
    # it is gone.
    if _mean_spread(x.attention_under(redrawn([("", x.model)]))) > 10 * FLAT:
        return
    view = with_proven_cuts(x.view)
    for power, words in ((1.5, "1 / width**2"), (1.0, "1 / width**1.5"), (0.5, "1 / width")):
        with operating(x.model, Operation(temperature=width**-power), view=view):
            seen = x.attention_under()
        after = _mean_spread(seen)
        if 0.02 < after < 5:
            change = _scaled(x, doubled_scale, width)
            yield Finding(
                "doubled_scale",
                f"Attention is uniform to {spread:.1g}: the scores are too small by a factor of about "
                f"{width**power:.0f}, as with a scale of {words} instead of 1 / sqrt(width) for heads {width} wide.",
                change
                or f"Scale the scores once, by 1 / sqrt({width}) (F.scaled_dot_product_attention and "
                "nn.MultiheadAttention scale by themselves)",
                tried=bool(change),
                measured="standard deviation of the scores of a row",
                before=spread,
                after=after,
                intervention=f"with scores multiplied by {width**power:.0f}",
            )
            return
