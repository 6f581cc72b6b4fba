"""The vocabulary of sites and how a choice of them is written."""

from __future__ import annotations

import pytest

from rankscope.errors import InputError, UnknownNameError
from rankscope.stream.sites import DEFAULT_SITES, SiteRef, SiteSelection


def test_layers_of_one_site_add_up_and_all_wins() -> None:
    chosen = SiteSelection.parse(["block.out@1", "block.out@3,4", "block.in", "block.in@2"])
    assert [layer for layer in range(6) if SiteRef(None, layer, "block.out") in chosen] == [1, 3, 4]
    assert all(SiteRef("decoder", layer, "block.in") in chosen for layer in range(6))
    assert SiteRef(None, 0, "final") not in chosen


def test_attention_is_wanted_only_when_a_probability_site_is() -> None:
    assert SiteSelection.parse(["cross_attention.probs@0"]).wants_attention
    assert not SiteSelection.parse(["attention.out"]).wants_attention
    assert SiteSelection.parse(DEFAULT_SITES).wants_attention


def test_wrong_words() -> None:
    with pytest.raises(UnknownNameError, match=r"Did you mean 'mlp.out'"):
        SiteSelection.parse(["mpl.out"])
    with pytest.raises(InputError, match=r"block numbers"):
        SiteSelection.parse(["mlp.out@"])


def test_a_place_reads_as_words() -> None:
    assert str(SiteRef("encoder", 3, "mlp.sum")) == "encoder block 3 mlp.sum"
    assert str(SiteRef(None, 0, "block.in")) == "block 0 block.in"
    assert SiteRef(None, 0, "block.in") not in SiteSelection.parse(["block.out"])
    assert "block.in" not in SiteSelection.parse(["block.in"])
