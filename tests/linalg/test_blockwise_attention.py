"""Attention gone through by tiles equals attention held in memory."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rankscope._types import Status
from rankscope.errors import InputError
from rankscope.linalg import score_strips
from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.blockwise_attention import BlockwiseAttention
from rankscope.metrics import METRICS, MetricValues, evaluate
from rankscope.stream.attention_calls import AttentionCall

EVERY = [spec for spec in METRICS.values() if spec.side == "attention"]
SUMS = [spec for spec in EVERY if spec.needs != "spectrum"]
BOUND = next(i for i, spec in enumerate(EVERY) if spec.name == "attention_contraction_bound")
ENTROPY = next(i for i, spec in enumerate(EVERY) if spec.name == "attention_entropy")
LOWEST = torch.finfo(torch.float32).min


def heads(seed: int, queries: int, keys: int, *, sharp: float = 1.0, key_heads: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 2, queries, 8, dtype=torch.float64, generator=generator)
    k = torch.randn(2, key_heads, keys, 8, dtype=torch.float64, generator=generator)
    return q * sharp, k


def dense(call: AttentionCall, keep: Tensor | None = None, specs: list = EVERY) -> MetricValues:
    return evaluate(specs, AttentionMatrix(call.probs(), call.support(), keep), 1e-15)


def by_tiles(call: AttentionCall, keep: Tensor | None = None, specs: list = EVERY, **options: object) -> MetricValues:
    view = BlockwiseAttention(
        call.query, call.key, mask=call.mask, is_causal=call.is_causal, scale=call.scale, keep=keep, **options
    )
    return evaluate(specs, view, 1e-15)


def assert_equal(got: MetricValues, want: MetricValues, rtol: float = 1e-10) -> None:
    """Same statuses and values; what is at the float floor, there rounding alone, need only be as small."""
    assert torch.equal(got.statuses, want.statuses)
    floor = want.statuses == list(Status).index(Status.FLOOR)
    assert bool((got.values[floor].abs() < 1e-13).all())
    got, want = (MetricValues(one.values.masked_fill(floor, 0.0), one.statuses) for one in (got, want))
    # The entropy of a row that picks one key is a difference of sums near one, and right to the rounding of those.
    torch.testing.assert_close(got.values[ENTROPY], want.values[ENTROPY], rtol=rtol, atol=1e-15, equal_nan=True)
    exact = [i for i in range(len(got.values)) if i not in (BOUND, ENTROPY)]
    torch.testing.assert_close(got.values[exact], want.values[exact], rtol=rtol, atol=0, equal_nan=True)
    if len(got.values) > BOUND:
        above = got.values[BOUND] >= want.values[BOUND] * (1 - rtol)
        assert bool((above | want.values[BOUND].isnan()).all())


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 1000),
    queries=st.integers(1, 40),
    keys=st.integers(1, 40),
    height=st.integers(1, 17),
    causal=st.booleans(),
    padding=st.booleans(),
    masked=st.sampled_from(["none", "bool", "added", "per head"]),
    key_heads=st.sampled_from([1, 2]),
    sharp=st.sampled_from([0.1, 1.0, 6.0]),
)
# In the first sequence no row sees a key.
@example(seed=186, queries=2, keys=7, height=1, causal=True, padding=False, masked="bool", key_heads=1, sharp=0.1)
def test_equal_to_dense(seed, queries, keys, height, causal, padding, masked, key_heads, sharp) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k = heads(seed, queries, keys, sharp=sharp, key_heads=key_heads)
    seen = torch.rand(2, 1, queries, keys, generator=generator) < 0.7
    mask = {
        "none": None,
        "bool": seen,
        "added": torch.where(seen, torch.randn(seen.shape, dtype=torch.float64, generator=generator), -math.inf),
        "per head": torch.randn(2, queries, keys, dtype=torch.float64, generator=generator),
    }[masked]
    keep = torch.rand(2, queries, generator=generator) < 0.8 if padding else None
    call = AttentionCall(query=q, key=k, mask=mask, is_causal=causal, scale=0.4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(score_strips, "_LEAST_ROWS", height)
        patch.setattr(score_strips, "_CPU_ENTRIES", 0)
        got = by_tiles(call, keep, spectrum=True, passes=100)
    assert_equal(got, dense(call, keep))


@pytest.mark.parametrize("lowest", [LOWEST, -1e9, -1e4])
def test_rows_with_every_key_hidden_by_a_finite_number_are_what_the_model_makes_of_them(lowest: float) -> None:
    q, k = heads(0, 24, 24)
    mask = torch.zeros(24, 24).masked_fill(~torch.ones(24, 24, dtype=torch.bool).tril(-1), lowest)
    call = AttentionCall(query=q.float(), key=k.float(), mask=mask)
    assert_equal(by_tiles(call), dense(call), rtol=2e-3 if lowest == -1e4 else 1e-6)


def test_near_collapse_the_deviation_keeps_its_digits() -> None:
    """Relative deviation 1e-9: taken as a difference of sums of squares it would be lost entirely."""
    q, k = heads(1, 300, 300, sharp=1e-9)
    call = AttentionCall(query=q, key=k)
    got, want = by_tiles(call, specs=SUMS), dense(call, specs=SUMS)
    assert float(want.values[[spec.name for spec in SUMS].index("attention_rank_one_distance")].max()) < 1e-8
    torch.testing.assert_close(got.values, want.values, rtol=1e-6, atol=0)


def test_float32_is_as_near_the_truth_as_dense_float32() -> None:
    q, k = heads(2, 600, 300)
    truth = dense(AttentionCall(query=q, key=k)).values
    call = AttentionCall(query=q.float(), key=k.float())
    assert_equal(by_tiles(call), MetricValues(truth, dense(call).statuses), rtol=2e-6)


def test_the_spectrum_may_be_asked_for_late() -> None:
    q, k = heads(4, 30, 30)
    call = AttentionCall(query=q, key=k)
    assert_equal(by_tiles(call, spectrum=False), dense(call))


@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("causal", [False, True])
def test_an_estimate_says_so_and_its_interval_holds_the_value(passes: int, causal: bool) -> None:
    q, k = heads(5, 400, 400)
    call = AttentionCall(query=q, key=k, is_causal=causal)
    true = AttentionMatrix(call.probs(), call.support()).largest_centred_singular_value
    view = BlockwiseAttention(q, k, is_causal=causal, spectrum=True, passes=passes)
    assert bool(view.is_spectrum_estimated.all())
    assert bool((view.largest_centred_singular_value <= true * (1 + 1e-12)).all())
    assert bool((view.centred_singular_value_bound >= true * (1 - 1e-12)).all())
    assert bool((view.largest_centred_singular_value > 0.8 * true).all())
    reading = evaluate([METRICS["attention_contraction"], METRICS["attention_entropy"]], view, 1e-15)
    assert (reading.statuses[0] == list(Status).index(Status.ESTIMATE)).all()
    assert (reading.statuses[1] == list(Status).index(Status.OK)).all()


def test_identity_like_attention_is_bounded_by_its_column_sums() -> None:
    q = 60 * torch.eye(64, dtype=torch.float64).expand(1, 1, 64, 64)
    view = BlockwiseAttention(q, q, spectrum=True, passes=1)
    assert float(view.centred_singular_value_bound) == pytest.approx(1.0, rel=1e-6)
    assert float(view.largest_centred_singular_value) == pytest.approx(1.0, rel=1e-6)


@pytest.mark.slow
def test_no_tensor_of_queries_by_keys_is_made() -> None:
    class Largest(TorchDispatchMode):
        entries = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for one in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(one, Tensor):
                    self.entries = max(self.entries, one.untyped_storage().nbytes() // one.element_size())
            return out

    tokens = 16_384
    q = torch.randn(1, 1, tokens, 8)
    with Largest() as seen:
        evaluate(SUMS, BlockwiseAttention(q, q, is_causal=True), 1e-7)
        evaluate(EVERY, BlockwiseAttention(q, q, is_causal=True, spectrum=True, passes=2), 1e-7)
    assert seen.entries <= tokens * tokens / 16
    few = q[:, :, :1024]
    with Largest() as seen:
        AttentionCall(query=few, key=few, is_causal=True).probs()
    assert seen.entries == 1024 * 1024


def test_what_is_not_finite_is_told() -> None:
    q, k = heads(6, 20, 20)
    q[0, 1, 3, 2] = math.nan
    reading = by_tiles(AttentionCall(query=q, key=k), spectrum=True)
    assert (reading.statuses[:, 0, 1] == list(Status).index(Status.NOT_FINITE)).all()
    assert (reading.statuses[:, 1] == list(Status).index(Status.OK)).all()


@pytest.mark.parametrize(
    ("query", "key", "keep", "mask", "passes", "words"),
    [
        ((1, 2, 3, 4), (1, 2, 3, 5), None, None, None, "same batch and dim"),
        ((1, 3, 3, 4), (1, 2, 3, 4), None, None, None, "a multiple of those of key"),
        ((2, 3, 4), (2, 3, 4), None, None, None, "(batch, heads, tokens, dim)"),
        ((1, 2, 3, 4), (1, 2, 3, 4), (1, 4), None, None, "one per query"),
        ((1, 2, 3, 4), (1, 2, 3, 4), None, (5, 3), None, "broadcasts to"),
        ((1, 2, 3, 4), (1, 2, 3, 4), None, None, 0, "at least one walk"),
    ],
)
def test_refusals(query, key, keep, mask, passes, words) -> None:
    with pytest.raises(InputError, match=words.replace("(", r"\(").replace(")", r"\)")):
        BlockwiseAttention(
            torch.zeros(query),
            torch.zeros(key),
            keep=None if keep is None else torch.ones(keep, dtype=torch.bool),
            mask=None if mask is None else torch.ones(mask, dtype=torch.bool),
            passes=passes,
        )


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_2048_tokens_in_float64(causal: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    q, k = (torch.randn(1, 2, 2048, 64, dtype=torch.float64, generator=generator) for _ in range(2))
    call = AttentionCall(query=q, key=k, is_causal=causal)
    assert_equal(by_tiles(call, spectrum=True), dense(call))
