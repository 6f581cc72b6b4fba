from __future__ import annotations

import pytest
import torch

from rankscope.errors import InputError
from rankscope.linalg import tiles
from rankscope.linalg.attention import AttentionMatrix
from rankscope.linalg.tokens import Tokens
from rankscope.metrics import METRICS


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@pytest.mark.parametrize("shape", [(4, 30, 5), (4, 5, 30), (1, 64, 64)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_pieces_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], dtype) -> None:
    x = (gaussian(*shape) + 0.3).to(dtype)
    keep = torch.rand(shape[:-1]) < 0.8
    whole = {name: spec.function(Tokens(x, keep)) for name, spec in METRICS.items() if spec.side == "tokens"}
    monkeypatch.setattr(tiles, "_PAIRED_ENTRIES", 0)
    monkeypatch.setattr(tiles, "_CPU_ENTRIES", 47)
    monkeypatch.setattr(tiles, "_MOST_CPU_ENTRIES", 47)
    view = Tokens(x, keep)
    assert len(list(view.pieces())) > 4
    for name, want in whole.items():
        torch.testing.assert_close(METRICS[name].function(view), want, rtol=1e-12, atol=1e-14, msg=name)


def test_input_is_left_as_it_was() -> None:
    for dtype in (torch.float64, torch.float32):
        x = gaussian(3, 6, 4).to(dtype).requires_grad_()
        before = x.detach().clone()
        keep = torch.ones(3, 6, dtype=torch.bool)
        for name, spec in METRICS.items():
            if spec.side == "tokens":
                assert not spec.function(x).requires_grad, name
                spec.function(Tokens(x, keep))
        assert torch.equal(x.detach(), before)


def test_a_transposed_layout_is_read_right() -> None:
    x = gaussian(6, 2, 4)
    view = Tokens(x.transpose(0, 1))
    torch.testing.assert_close(view.energies.row.sum(-1) * view.scale**2, x.square().sum((0, 2)), rtol=1e-14, atol=0)


def test_no_tokens_at_all() -> None:
    for name, spec in METRICS.items():
        if spec.side == "tokens":
            assert torch.isnan(spec.function(torch.empty(3, 0, 4))).all(), name


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e160, 1e300])
def test_no_overflow_and_no_underflow(scale: float) -> None:
    x = gaussian(7, 4)
    for name, spec in METRICS.items():
        if spec.side == "tokens":
            absolute = "SCALE" not in str(spec.invariant_to)
            want = spec.function(x) * (scale if absolute else 1.0)
            torch.testing.assert_close(spec.function(x * scale), want, rtol=1e-11, atol=0, msg=name)


def test_narrow_formats_at_the_ends_of_their_range() -> None:
    for x in (torch.full((3, 2), 3e38), torch.full((3, 2), 1e-45)):
        assert METRICS["stable_rank"].function(x).item() == pytest.approx(1.0, abs=1e-15)
        assert METRICS["participation_ratio"].function(x).item() == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize(
    ("x", "keep", "says"),
    [
        (torch.ones(3, 4, dtype=torch.int64), None, "token ids"),
        (torch.ones(4), None, "tokens, dim"),
        (torch.ones(4, 0), None, "tokens, dim"),
        (torch.ones(2, 4, 3), torch.ones(2, 4), "attention_mask.bool"),
        (torch.ones(2, 4, 3), torch.ones(2, 3, dtype=torch.bool), r"\(2, 4\)"),
    ],
)
def test_what_is_refused(x: torch.Tensor, keep: torch.Tensor | None, says: str) -> None:
    with pytest.raises(InputError, match=says):
        Tokens(x, keep)


@pytest.mark.parametrize(
    ("probs", "support", "keep", "says"),
    [
        (torch.ones(4, 4), None, None, "heads, query, key"),
        (torch.ones(2, 4, 4), torch.ones(4, 4), None, "True where a query may see a key"),
        (torch.ones(2, 4, 4), torch.ones(3, 4, dtype=torch.bool), None, "broadcast"),
        (torch.ones(5, 2, 4, 4), None, torch.ones(2, 4, dtype=torch.bool), r"\(5, 4\)"),
    ],
)
def test_what_attention_refuses(probs, support, keep, says: str) -> None:
    with pytest.raises(InputError, match=says):
        AttentionMatrix(probs, support, keep)


def test_support_of_every_broadcast_shape_is_the_same() -> None:
    P = torch.softmax(gaussian(2, 3, 5, 5).masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf), -1)
    causal = torch.ones(5, 5, dtype=torch.bool).tril()
    for name in ("attention_entropy", "first_token_sink_rate"):
        want = METRICS[name].function(AttentionMatrix(P, causal.expand(2, 3, 5, 5)))
        for shape in ((5, 5), (1, 5, 5), (1, 1, 5, 5), (2, 1, 5, 5)):
            got = METRICS[name].function(AttentionMatrix(P, causal.expand(shape)))
            torch.testing.assert_close(got, want, rtol=0, atol=0)
