from __future__ import annotations

from fractions import Fraction
from math import comb

import pytest

from rankscope.ext.paths.census import census

PUBLISHED = [(12, 6), (4, 12), (12, 12), (16, 24), (16, 32), (32, 24), (128, 24), (96, 96), (3, 12)]


@pytest.mark.parametrize(("heads", "layers"), PUBLISHED)
def test_binomial_law(heads: int, layers: int) -> None:
    found = census([heads] * layers)
    assert found.counts == tuple(comb(layers, k) * heads**k for k in range(layers + 1))
    assert found.total == (1 + heads) ** layers
    assert found.mean_length == Fraction(layers * heads, 1 + heads)


def test_bert_base() -> None:
    found = census([12] * 12)
    assert f"{found.total:.2e}" == "2.33e+13"
    assert f"{sum(found.counts[:7]) / found.total:.1e}" == "1.3e-04"


def test_without_skips_there_is_one_length() -> None:
    assert census([2, 3], [False, False]).counts == (0, 0, 6)
    assert census([2, 3], [True, False]).counts == (0, 3, 6)
