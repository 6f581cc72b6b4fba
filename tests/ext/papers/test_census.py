"""Counting paths, against enumeration and the binomial law."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np
import pytest

from rankscope.ext.papers.dong2021_path_census.run import COUNT, SHARE, path_counts
from rankscope.ext.papers.reproducing import reproduce


@pytest.mark.parametrize(("heads", "blocks"), [(1, 4), (2, 3), (3, 5)])
def test_thm_2_1_with_skips_by_enumeration(heads: int, blocks: int) -> None:
    walks = itertools.product(range(heads + 1), repeat=blocks)
    lengths = Counter(sum(step > 0 for step in walk) for walk in walks)
    assert path_counts(heads, blocks) == [lengths[length] for length in range(blocks + 1)]


def test_bert_base_as_published() -> None:
    run = reproduce("dong2021-path-census")
    rows = [row for row in run.table.to_pylist() if row["model"] == "BERT-base, ViT-B"]
    share = np.array([row["value"] for row in rows if row["metric"] == SHARE])
    count = sum(row["value"] for row in rows if row["metric"] == COUNT)
    assert count == 13**12
    assert f"{count:.2e}" == "2.33e+13"
    assert f"{(share * np.arange(13)).sum():.2f}" == "11.08"
    assert f"{share[:7].sum():.1e}" == "1.3e-04"


def test_lengths_are_binomial() -> None:
    heads, blocks = 16, 24
    chance = heads / (1 + heads)
    total = (1 + heads) ** blocks
    for length, count in enumerate(path_counts(heads, blocks)):
        law = math.comb(blocks, length) * chance**length * (1 - chance) ** (blocks - length)
        assert count / total == pytest.approx(law, rel=1e-12)
