"""Strips of scores against the whole matrix, for rows that stand anywhere in their sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rankscope.linalg import score_strips
from rankscope.linalg.score_strips import HeadScores, largest_scores

HEADS, QUERIES, KEYS, DIM = 2, 14, 13, 5
PLACES = {
    "all": list(range(QUERIES)),
    "some together": [3, 4, 5, 6],
    "one gap of two": [2, 3, 6, 7],  # last - first is the height plus one
    "one gap of one": [2, 3, 5],
    "far apart": [0, 5, 6, 12, 13],
    "the last": [13],
}


@pytest.fixture(autouse=True)
def small_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three rows to a strip."""
    monkeypatch.setattr(score_strips, "_LEAST_ROWS", 3)
    monkeypatch.setattr(score_strips, "_CPU_ENTRIES", 28)


def head() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(HEADS, QUERIES, DIM, dtype=torch.float64, generator=generator)
    return q, torch.randn(HEADS, KEYS, DIM, dtype=torch.float64, generator=generator)


def mask_of(kind: str) -> Tensor | None:
    generator = torch.Generator().manual_seed(1)
    seen = torch.rand(HEADS, QUERIES, KEYS, generator=generator) < 0.7
    seen[0, 6] = False
    added = torch.randn(HEADS, QUERIES, KEYS, dtype=torch.float64, generator=generator)
    return {"none": None, "bool": seen, "added": added.masked_fill(~seen, -torch.inf)}[kind]


def whole(query: Tensor, key: Tensor, scale: float, causal: bool, mask: Tensor | None) -> Tensor:
    """The matrix of all scores, -inf where a key is hidden."""
    scores = scale * query @ key.mT
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    later = torch.arange(KEYS) > torch.arange(QUERIES)[:, None]
    return scores.masked_fill(later, -torch.inf) if causal else scores


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "added"])
def test_strips_are_pieces_of_the_whole(places: str, causal: bool, kind: str) -> None:
    q, k = head()
    rows, mask = torch.tensor(PLACES[places]), mask_of(kind)
    scores = HeadScores.of(q, k, 0.4, rows.tolist(), causal=causal, mask=mask)
    assert (scores.heads, scores.rows, scores.keys) == (2, len(rows), KEYS)
    want, room, found = whole(q, k, 0.4, causal, mask)[:, rows], scores.room(), []
    for strip in scores.strips():
        got = scores.strip(strip, room)
        # a strip ends with the last key that its last row may see
        assert got.shape[-1] == (min(KEYS, PLACES[places][strip.stop - 1] + 1) if causal else KEYS)
        found.append(torch.nn.functional.pad(got, (0, KEYS - got.shape[-1]), value=-torch.inf))
    torch.testing.assert_close(torch.cat(found, 1), want, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(largest_scores(scores), want.amax(-1), rtol=1e-13, atol=1e-13)
