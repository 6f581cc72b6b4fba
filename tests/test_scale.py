"""The page on scale: its arithmetic against published sizes, and its tables against the rates beside them."""

from __future__ import annotations

import pytest
from benchmarks.scale_costs import block_seconds, hub_totals
from benchmarks.scale_shapes import HUB, SHAPES
from benchmarks.scale_tables import DATA, amount, read, words, written


def test_shapes_have_the_published_number_of_parameters() -> None:
    published = {"8B (Llama 3)": 8.03e9, "70B (Llama 3)": 70.55e9, "405B (Llama 3.1)": 405.85e9}
    for shape in SHAPES:
        if shape.name in published:
            assert shape.parameters == pytest.approx(published[shape.name], rel=2e-3)
        else:
            assert shape.parameters == pytest.approx(1e12, rel=0.05)


def test_a_mixture_meets_few_of_its_weights() -> None:
    mixture = SHAPES[-1]
    assert mixture.blocks * mixture.active_block == pytest.approx(32e9, rel=0.2)


def test_the_shares_of_a_hub_are_shares() -> None:
    assert sum(kind.share for kind in HUB) == pytest.approx(1)
    large = sum(kind.share * kind.shape.parameters for kind in HUB[3:])
    assert 0.4 < large / sum(kind.share * kind.shape.parameters for kind in HUB) < 0.6, "the page says about half"


def test_the_tables_are_those_of_the_rates() -> None:
    for name, text in written(*read(DATA)).items():
        assert (DATA / name).read_text(encoding="utf-8") == text, f"run: python -m benchmarks.scale_tables ({name})"


def test_costs_by_hand() -> None:
    rates, _ = read(DATA)
    simple = {**rates, "read_cold_bytes_per_second": 1e9, "flops_bfloat16": 1e30, "width": 4096,
              "battery_seconds_bfloat16": 0.0, "attention_seconds_bfloat16": 0.0}  # fmt: skip
    eight = SHAPES[0]
    assert eight.block == 2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert block_seconds(simple, eight) == pytest.approx(2 * eight.block / 1e9), "reading is the slower"
    slow = {**simple, "flops_bfloat16": 1e12}
    work = 8 * (2 * eight.block * 128 + 4 * 128**2 * 4096)
    assert block_seconds(slow, eight) == pytest.approx(max(work / 1e12, 2 * eight.block / 1e9))
    totals = hub_totals(rates)
    reads = [total[0] for total in totals.values()]
    assert reads == sorted(reads)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.25, "0.25 s"),
        (9.94, "9.9 s"),
        (90, "90 s"),
        (3000, "50 min"),
        (7200, "2.0 h"),
        (3e5, "3.5 days"),
    ],
)
def test_durations(seconds: float, said: str) -> None:
    assert words(seconds) == said


@pytest.mark.parametrize(("count", "said"), [(12, "12 B"), (3.2e9, "3.2 GB"), (1.5e16, "15 PB")])
def test_amounts(count: float, said: str) -> None:
    assert amount(count) == said
