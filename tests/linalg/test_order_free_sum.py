"""A sum whose bits do not depend on order or grouping."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rankscope.linalg.order_free_sum import OrderFreeSum


def total(terms: list[float]) -> OrderFreeSum:
    found = OrderFreeSum([1])
    for term in terms:
        found.add(torch.tensor([term], dtype=torch.float64))
    return found


NUMBERS = st.floats(min_value=-1e30, max_value=1e30, allow_nan=False).filter(lambda x: x == 0 or abs(x) > 1e-200)


@given(terms=st.lists(NUMBERS, min_size=1, max_size=12), cut=st.integers(0, 12), order=st.randoms())
def test_order_and_grouping_change_no_bit(terms: list[float], cut: int, order) -> None:
    one = total(terms)
    shuffled = list(terms)
    order.shuffle(shuffled)
    first, second = total(shuffled[:cut]), total(shuffled[cut:])
    second.merge(first)
    again = OrderFreeSum.from_json(second.to_json())
    assert again.total().item() == one.total().item()


@given(terms=st.lists(NUMBERS, min_size=1, max_size=12))
def test_it_is_the_sum_to_64_bits_below_the_largest_term(terms: list[float]) -> None:
    want = sum((Fraction(term) for term in terms), Fraction(0))
    largest = max(abs(Fraction(term)) for term in terms)
    got = Fraction(total(terms).total().item())
    # Twelve terms lose at most one unit of the lowest digit each; the result is rounded to float64.
    assert abs(got - want) <= 12 * largest / 2**64 + abs(want) / 2**51


def test_plain_addition_does_depend_on_order() -> None:
    """The case that the class is for."""
    assert (1e16 + 1.0) - 1e16 != (1e16 - 1e16) + 1.0
    assert total([1e16, 1.0, -1e16]).total().item() == total([1e16, -1e16, 1.0]).total().item() == 1.0


@pytest.mark.parametrize("lost", [float("nan"), float("inf")])
def test_a_term_that_is_not_finite_is_not_lost(lost: float) -> None:
    found = total([1.0, lost, 2.0])
    assert torch.isnan(found.total()).all()
    other = total([1.0])
    other.merge(found)
    assert torch.isnan(other.total()).all()


def test_entries_of_a_matrix_are_added_each_for_itself() -> None:
    x = torch.randn(50, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = OrderFreeSum([4, 3])
    for term in x:
        found.add(term)
    torch.testing.assert_close(found.total(), x.sum(0), rtol=1e-14, atol=1e-14)
