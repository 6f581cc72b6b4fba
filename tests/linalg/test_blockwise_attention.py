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
from rankscope.errors import InputError, UnsupportedOperationError
from rankscope.linalg import score_strips
from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.blockwise_attention import BlockwiseAttention
from rankscope.metrics import METRICS, MetricValues, evaluate
from rankscope.stream.attention_calls import AttentionCall

SUMS = [spec for spec in METRICS.values() if spec.side == "attention" and spec.needs != "spectrum"]
ENTROPY = next(i for i, spec in enumerate(SUMS) if spec.name == "attention_entropy")
LOWEST = torch.finfo(torch.float32).min


def heads(seed: int, queries: int, keys: int, *, sharp: float = 1.0, key_heads: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, 2, queries, 8, dtype=torch.float64, generator=generator)
    k = torch.randn(2, key_heads, keys, 8, dtype=torch.float64, generator=generator)
    return q * sharp, k


def dense(call: AttentionCall, keep: Tensor | None = None) -> MetricValues:
    return evaluate(SUMS, AttentionMatrix(call.probs(), call.support(), keep), 1e-15)


def by_tiles(call: AttentionCall, keep: Tensor | None = None) -> MetricValues:
    view = BlockwiseAttention(
        call.query, call.key, mask=call.mask, is_causal=call.is_causal, scale=call.scale, keep=keep
    )
    return evaluate(SUMS, view, 1e-15)


def assert_equal(got: MetricValues, want: MetricValues, rtol: float = 1e-10) -> None:
    """Same statuses and values; what is at the float floor, there rounding alone, need only be as small."""
    assert torch.equal(got.statuses, want.statuses)
    floor = want.statuses == list(Status).index(Status.FLOOR)
    assert bool((got.values[floor].abs() < 1e-13).all())
    got, want = (MetricValues(one.values.masked_fill(floor, 0.0), one.statuses) for one in (got, want))
    # The entropy of a row that picks one key is a difference of sums near one, and right to the rounding of those.
    torch.testing.assert_close(got.values[ENTROPY], want.values[ENTROPY], rtol=rtol, atol=1e-15, equal_nan=True)
    exact = [i for i in range(len(got.values)) if i != ENTROPY]
    torch.testing.assert_close(got.values[exact], want.values[exact], rtol=rtol, atol=0, equal_nan=True)


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
        got = by_tiles(call, keep)
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
    got, want = by_tiles(call), dense(call)
    assert float(want.values[[spec.name for spec in SUMS].index("attention_rank_one_distance")].max()) < 1e-8
    torch.testing.assert_close(got.values, want.values, rtol=1e-6, atol=0)


def test_float32_is_as_near_the_truth_as_dense_float32() -> None:
    q, k = heads(2, 600, 300)
    truth = dense(AttentionCall(query=q, key=k)).values
    call = AttentionCall(query=q.float(), key=k.float())
    assert_equal(by_tiles(call), MetricValues(truth, dense(call).statuses), rtol=2e-6)


def test_a_singular_value_is_refused() -> None:
    q, k = heads(4, 30, 30)
    with pytest.raises(UnsupportedOperationError, match="needs all probabilities"):
        evaluate([METRICS["attention_contraction"]], BlockwiseAttention(q, k), 1e-15)


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
    assert seen.entries <= tokens * tokens / 16
    few = q[:, :, :1024]
    with Largest() as seen:
        AttentionCall(query=few, key=few, is_causal=True).probs()
    assert seen.entries == 1024 * 1024


def test_what_is_not_finite_is_told() -> None:
    q, k = heads(6, 20, 20)
    q[0, 1, 3, 2] = math.nan
    reading = by_tiles(AttentionCall(query=q, key=k))
    assert (reading.statuses[:, 0, 1] == list(Status).index(Status.NOT_FINITE)).all()
    assert (reading.statuses[:, 1] == list(Status).index(Status.OK)).all()


@pytest.mark.parametrize(
    ("query", "key", "keep", "mask", "words"),
    [
        ((1, 2, 3, 4), (1, 2, 3, 5), None, None, "same batch and dim"),
        ((1, 3, 3, 4), (1, 2, 3, 4), None, None, "a multiple of those of key"),
        ((2, 3, 4), (2, 3, 4), None, None, "(batch, heads, tokens, dim)"),
        ((1, 2, 3, 4), (1, 2, 3, 4), (1, 4), None, "one per query"),
        ((1, 2, 3, 4), (1, 2, 3, 4), None, (5, 3), "broadcasts to"),
    ],
)
def test_refusals(query, key, keep, mask, words) -> None:
    with pytest.raises(InputError, match=words.replace("(", r"\(").replace(")", r"\)")):
        BlockwiseAttention(
            torch.zeros(query),
            torch.zeros(key),
            keep=None if keep is None else torch.ones(keep, dtype=torch.bool),
            mask=None if mask is None else torch.ones(mask, dtype=torch.bool),
        )


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
def test_2048_tokens_in_float64(causal: bool) -> None:
    generator = torch.Generator().manual_seed(7)
    q, k = (torch.randn(1, 2, 2048, 64, dtype=torch.float64, generator=generator) for _ in range(2))
    call = AttentionCall(query=q, key=k, is_causal=causal)
    assert_equal(by_tiles(call), dense(call))
