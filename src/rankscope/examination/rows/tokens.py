"""Order of tokens, and maps that follow each other."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rankscope.examination.outcomes import Outcome
from rankscope.examination.passes import Examination
from rankscope.examination.rows.programs import Program, ids, per_token
from rankscope.examination.spec import Finding, row


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
