"""Order of tokens, and maps that follow each other."""

from __future__ import annotations

from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import DECODER
from rankscope.examination.spec import Finding, finding, row


@row(
    "order_unseen",
    order=19,
    needs={"loss"},
    good=DECODER.but(
        "scores.masked_fill(hidden, -torch.inf)", "scores",
        "torch.randint(1, 20, (12, 12))", "torch.randint(1, 5, (12, 12))",
        "text[:, :-1], text[:, 1:]", "text, text.roll(1, 1)",
    ),
    fault=(" + self.place[: ids.shape[1]]", ""),
)  # fmt: skip
def order_not_seen(x: Examination, unseen: Outcome) -> Finding:
    """A model that does not see the order of tokens, although its labels depend on it."""
    return finding(
        "The model does not see the order of tokens: in another order they have the same outputs. But equal tokens of "
        f"a sequence have different labels at {unseen['share']:.0%} of the tokens, which no such model can give.",
        "Add positions, or look at why they have no effect",
    )


@row("maps_follow", order=18, good=DECODER, fault=("nn.GELU()", "nn.Identity()"))
def no_activation(x: Examination, follow: Outcome) -> Finding:
    """Two linear maps without an activation between them."""
    one, other, width, _ = follow["pairs"][0]
    return finding(
        f"{other} reads what {one} returns without an activation between them, so that both are one linear map: the "
        f"{width} numbers in the middle add nothing.",
        "Put an activation between them",
        certainty="possible",
        where=one,
    )


@row(
    "tokens_alike",
    order=17,
    needs={"loss"},
    good=DECODER,
    fault=("self.head(self.norm(x))", "self.head(self.norm(x))[:, :1].expand(-1, ids.shape[1], -1)"),
)
def tokens_answered_alike(x: Examination, alike: Outcome) -> Finding:
    """One output for all tokens of a sequence, which have labels of their own."""
    return finding(
        f"All {alike['tokens']} tokens of a sequence have the same output, and the loss compares each with a label of "
        "its own.",
        "Look for a mean or a sum over the tokens, or for an operation along the wrong axis",
    )
