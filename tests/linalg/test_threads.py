import os

import pytest
import torch

from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.precision import float_floor
from rankscope.linalg.threads import over_threads
from rankscope.linalg.tokens import Tokens
from rankscope.linalg.update import Update
from rankscope.metrics import DEFAULT_TOKEN_METRICS, METRICS, evaluate


@pytest.fixture
def threads():
    """Sets the number of threads; the number of before is restored."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_makes_its_own_pool(threads):
    threads(2)
    assert over_threads(lambda x: x + 1, [1, 2]) == [2, 3]
    child = os.fork()
    if child == 0:
        os._exit(0 if over_threads(lambda x: x + 1, [1, 2]) == [2, 3] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def views(dtype, shape):
    drawn = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, generator=drawn) + 0.5).to(dtype)
    y = x + torch.randn(shape, generator=drawn).to(dtype)
    keep = torch.rand(shape[:2], generator=drawn) > 0.2
    scores = torch.randn(shape[0], 3, shape[1], shape[1], generator=drawn)
    causal = torch.ones(shape[1], shape[1], dtype=torch.bool).tril()
    probs = torch.softmax(scores.masked_fill(~causal, -torch.inf), -1).to(dtype)
    return {
        "tokens": lambda: Tokens(x),
        "kept tokens": lambda: Tokens(x, keep),
        "attention": lambda: AttentionMatrix(probs, causal, keep),
        "update": lambda: Update.between(x, y, keep),
    }


def compared(specs, one, several):
    """Names of metrics whose bits differ."""
    assert torch.equal(one.statuses, several.statuses)
    different = ~(one.values == several.values) & ~(one.values.isnan() & several.values.isnan())
    return [spec.name for spec, row in zip(specs, different, strict=True) if row.any()]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(8, 64, 256), (7, 150, 40), (16, 64, 512), (5, 33, 300), (3, 2, 4), (4, 128, 768)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bits_do_not_depend_on_the_number_of_threads(threads, dtype, shape):
    for name, view in views(dtype, shape).items():
        side = {"tokens": "tokens", "kept tokens": "tokens"}.get(name, name)
        specs = [spec for spec in METRICS.values() if spec.side == side]
        assert specs
        threads(1)
        alone = evaluate(specs, view(), float_floor(dtype))
        for number in (2, 8):
            threads(number)
            for _ in range(2):  # with all threads, and with one
                assert not compared(specs, alone, evaluate(specs, view(), float_floor(dtype))), name


def test_bits_of_tokens_with_outliers_and_of_close_ones_do_not_depend_on_threads(threads):
    """Sequences that need a second look must not be looked at alone."""
    drawn = torch.Generator().manual_seed(0)
    x = torch.randn(5, 120, 500, generator=drawn)
    x[1, :, 7] *= 1e4
    x[2] = 1 + 1e-4 * x[2]
    x[3, 5] *= 1e6
    specs = [spec for spec in METRICS.values() if spec.side == "tokens"]
    for dtype in (torch.float32, torch.float64):
        threads(1)
        alone = evaluate(specs, Tokens(x.to(dtype)), float_floor(dtype))
        for number in (2, 3):
            threads(number)
            for _ in range(2):
                assert not compared(specs, alone, evaluate(specs, Tokens(x.to(dtype)), float_floor(dtype)))


@pytest.mark.parametrize("shape", [(1, 128, 768), (2, 1024, 512)])
def test_values_of_a_single_or_a_long_sequence_agree_to_rounding(threads, shape):
    specs = [METRICS[name] for name in DEFAULT_TOKEN_METRICS]
    view = views(torch.float32, shape)["tokens"]
    threads(1)
    alone = evaluate(specs, view(), 0.0)
    threads(2)
    shared = evaluate(specs, view(), 0.0)
    assert torch.equal(alone.statuses, shared.statuses)
    torch.testing.assert_close(alone.values, shared.values, rtol=1e-9, atol=1e-12)
