"""Order of tokens, and maps that follow each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import Classifier, Program, Reader, classes, ids, per_token
from rankscope.examination.spec import Finding, row


class _Bag(nn.Module):
    """Logits of an id at each token, which sees itself and the mean of all tokens."""

    def __init__(self, places: bool) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20)
        self.places = nn.Parameter(torch.randn(10, 16)) if places else None

    def forward(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        x = x if self.places is None else x + self.places
        out: Tensor = self.head(x + self.mix(x.mean(1, keepdim=True)).tanh())
        return out


def _bag(places: bool) -> Program:
    """Tokens whose labels depend on where they are."""
    text = torch.randint(0, 4, (12, 10))
    return Program(_Bag(places), text, text.roll(1, 1), per_token)


@row(reads=("order_unseen",), order=19, needs={"loss"}, bad=lambda: _bag(False), good=lambda: _bag(True))
def order_not_seen(x: Examination, unseen: Outcome) -> Finding:
    """A model that does not see the order of tokens, although its labels depend on it."""
    return Finding(
        "order_not_seen",
        "The model does not see the order of tokens: in another order they have the same outputs. But equal tokens of "
        f"a sequence have different labels at {unseen['share']:.0%} of the tokens, which no such model can give.",
        "Add positions, or look at why they have no effect",
        measured="share of the tokens whose label differs from that of an equal token",
        before=unseen["share"],
    )


class _Prefixed(nn.Module):
    """Attention to a prefix and to the tokens up to one's own."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.embed, self.prefix, self.whole = nn.Embedding(20, 16), nn.Parameter(torch.randn(4, 16)), whole
        self.head = nn.Linear(16, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        keys = torch.cat([self.prefix.expand(len(x), -1, -1), x], dim=1)
        queries = keys if self.whole else x
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, keys, is_causal=True)
        out: Tensor = self.head(mixed[:, -x.shape[1] :] + x)
        return out


def _prefixed(whole: bool) -> Program:
    """Text whose label is the next token, with queries for the prefix too, or for the text alone."""
    text = ids(12, 11)
    return Program(_Prefixed(whole), text[:, :-1], text[:, 1:], per_token)


@row(reads=("causal_corner",), order=16, bad=lambda: _prefixed(False), good=lambda: _prefixed(True))
def mask_at_wrong_corner(x: Examination, corner: Outcome) -> Finding:
    """A causal mask of fewer queries than keys, which begins at the first key."""
    queries, keys, place = corner["queries"], corner["keys"], corner["place"]
    return Finding(
        "mask_at_wrong_corner",
        f"is_causal=True with {queries} queries and {keys} keys"
        + (f" in `{place.name}`" if place is not None else "")
        + f" lets each query see as many keys as it has queries up to itself: the last {keys - queries} keys are seen "
        "by none.",
        "Pass attn_mask=torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries) instead of is_causal",
        measured="keys that no query sees",
        before=float(keys - queries),
        after=0.0,
        intervention="with that mask",
    )


class _Deep(Classifier):
    """A classifier with a feed-forward part, with or without an activation between its two maps."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(16, 64), act, nn.Linear(64, 16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        out: Tensor = self.head((x + self.mlp(x)).mean(1))
        return out


def _deep(act: nn.Module) -> Program:
    """Sequences with a class each."""
    return Program(_Deep(act), ids(), classes())


@row(reads=("maps_follow",), order=18, bad=lambda: _deep(nn.Identity()), good=lambda: _deep(nn.GELU()))
def no_activation(x: Examination, follow: Outcome) -> Finding:
    """Two linear maps without an activation between them."""
    one, other, width, _ = follow["pairs"][0]
    return Finding(
        "no_activation",
        f"{other} reads what {one} returns without an activation between them, so that both are one linear map: the "
        f"{width} numbers in the middle add nothing.",
        "Put an activation between them",
        certainty="possible",
        measured="pairs of linear maps with nothing between them and a wide middle",
        before=float(len(follow["pairs"])),
        where=one,
    )


class _Pooled(Reader):
    """Logits of the next id, from the first token or from each."""

    def __init__(self, pooled: bool) -> None:
        super().__init__()
        self.pooled = pooled

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = super().forward(ids)
        return out[:, :1].expand_as(out).contiguous() if self.pooled else out


def _pooled(pooled: bool) -> Program:
    """Text whose label is the next token."""
    text = ids(12, 12)
    return Program(_Pooled(pooled), text[:, :-1], text[:, 1:], per_token)


@row(reads=("tokens_alike",), order=17, needs={"loss"}, bad=lambda: _pooled(True), good=lambda: _pooled(False))
def tokens_answered_alike(x: Examination, alike: Outcome) -> Finding:
    """One output for all tokens of a sequence, which have labels of their own."""
    return Finding(
        "tokens_answered_alike",
        f"All {alike['tokens']} tokens of a sequence have the same output, and the loss compares each with a label of "
        "its own.",
        "Look for a mean or a sum over the tokens, or for an operation along the wrong axis",
        measured="largest difference between the outputs of a sequence's tokens, above rounding",
        before=0.0,
    )
