"""Tiles of scores against the whole matrix, for rows that stand anywhere in their sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rankscope.linalg import score_tiles
from rankscope.linalg.score_tiles import LEAST, HeadScores, row_log_sums

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
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four keys to a tile, so that the last holds one and three of filling; three or four rows to a strip."""
    monkeypatch.setattr(score_tiles, "_TILE_KEYS", 4)
    monkeypatch.setattr(score_tiles, "_CPU_ENTRIES", 28)


def head(sharp: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = sharp * torch.randn(HEADS, QUERIES, DIM, dtype=torch.float64, generator=generator)
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


def joined(scores: HeadScores, *, logs: bool = False) -> Tensor:
    """All tiles of all strips, put together again; -inf where a strip's tiles end."""
    shape = scores.heads, scores.rows, scores.tiles * scores.width
    found = torch.full(shape, LEAST if logs else -torch.inf, dtype=torch.float64)
    for strip in scores.strips():
        for tile in range(strip.tiles):
            out = torch.empty(scores.heads, strip.height, scores.width, dtype=torch.float64)
            (scores.put_log if logs else scores.put)(out, strip, tile)
            found[:, strip.rows, tile * scores.width : (tile + 1) * scores.width] = out
    return found


@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "added"])
def test_tiles_are_pieces_of_the_whole(places: str, causal: bool, kind: str) -> None:
    q, k = head()
    rows, mask = torch.tensor(PLACES[places]), mask_of(kind)
    scores = HeadScores.of(q, k, 0.4, rows.tolist(), causal=causal, mask=mask)
    got, want = joined(scores), whole(q, k, 0.4, causal, mask)[:, rows]
    torch.testing.assert_close(got[..., :KEYS], want, rtol=1e-13, atol=1e-13)
    assert bool((got[..., KEYS:] == -torch.inf).all())
    assert (scores.heads, scores.rows, scores.tiles, scores.width) == (2, len(rows), 4, 4)
    # a strip ends with the last key that its last row may see
    for strip in scores.strips():
        assert strip.tiles == (min(4, strip.last // 4 + 1) if causal else 4)
        assert strip.reach == pytest.approx(float(scores.query[:, strip.rows].norm(dim=-1).max()), rel=1e-14)


@pytest.mark.parametrize("places", ["all", "far apart"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "added"])
@pytest.mark.parametrize("sharp", [1.0, 60.0])
def test_log_sums_are_those_of_the_whole(places: str, causal: bool, kind: str, sharp: float) -> None:
    q, k = head(sharp)
    rows, mask = torch.tensor(PLACES[places]), mask_of(kind)
    largest, rest = row_log_sums(HeadScores.of(q, k, 0.4, rows.tolist(), causal=causal, mask=mask))
    want = whole(q, k, 0.4, causal, mask)[:, rows]
    sees = (want > -torch.inf).any(-1)
    torch.testing.assert_close((largest + rest)[sees], want.logsumexp(-1)[sees], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(largest[sees], want.amax(-1)[sees], rtol=1e-13, atol=1e-13)
    assert (largest[~sees].tolist(), rest[~sees].tolist()) == ([0.0] * int((~sees).sum()),) * 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["none", "bool", "added"])
# at 18 no score is below the least, but a score less its row's log-sum is
@pytest.mark.parametrize("sharp", [0.1, 18.0, 60.0])
@pytest.mark.parametrize("late", [False, True])
def test_logarithms_of_probabilities_are_never_below_the_least(
    causal: bool, kind: str, sharp: float, late: bool
) -> None:
    q, k = head(sharp)
    rows, mask = torch.tensor(PLACES["far apart"]), mask_of(kind)
    scores = HeadScores.of(q, k, 0.4, rows.tolist(), causal=causal, mask=mask)
    largest, rest = row_log_sums(scores)
    logs = scores.less(largest, rest) if late else scores.less(largest + rest)
    want = whole(q, k, 0.4, causal, mask)[:, rows] - (largest + rest).unsqueeze(-1)
    got = joined(logs, logs=True)
    torch.testing.assert_close(got[..., :KEYS], want.clamp_min(LEAST), rtol=1e-12, atol=1e-12)
    assert bool((got[..., KEYS:] == LEAST).all())
    few = [1, 3]
    torch.testing.assert_close(joined(logs.pick(few), logs=True), got[:, few], rtol=1e-12, atol=1e-12)


def test_without_rows_there_are_no_sums() -> None:
    q, k = head()
    largest, rest = row_log_sums(HeadScores.of(q, k, 0.4, [], mask=None))
    assert largest.shape == rest.shape == (2, 0)


def test_half_precision_is_widened() -> None:
    q, k = (one.bfloat16() for one in head())
    scores = HeadScores.of(q, k, 0.5, range(QUERIES), mask=None)
    assert scores.query.dtype == scores.key.dtype == torch.float32
    assert torch.equal(scores.query, q.float() * 0.5)
