"""The cubic law against attention computed in many digits, closed forms, and networks it does not describe."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from mpmath import mp

from rankscope.errors import InputError
from rankscope.linalg.attention_weights import HeadTensors, head_tensors
from rankscope.linalg.cubic_law import cubic_step
from rankscope.models.heads import HeadWeights
from tests.ext.theory.networks import Layer, random_layer, random_tokens
from tests.reference import cubic as reference

LOG10 = math.log(10)


def nine_layers() -> tuple[list[Layer], np.ndarray]:
    """The network whose residuals the theory notes give: 9 layers, 4 heads, 24 tokens in 32 dimensions."""
    rng, dim, heads = np.random.default_rng(1), 32, 4
    width = dim // heads

    def draw() -> dict[str, np.ndarray]:
        made = {name: rng.normal(size=(dim, width)) / np.sqrt(dim) for name in ("W_Q", "W_K", "W_V")}
        made["W_O"] = rng.normal(size=(width, dim)) / np.sqrt(width * heads)
        made["b_Q"] = rng.normal(size=width) * 0.5
        rng.normal(size=width)  # a key bias, which no row of attention can see
        return made

    layers = [Layer([draw() for _ in range(heads)], width**-0.5) for _ in range(9)]
    return layers, rng.normal(size=(24, dim))


def test_nine_layers_down_to_ten_to_the_minus_4218() -> None:
    """Predicted and exact agree to 5 decimals of log10 from layer 4 on; the exact values are the published ones."""
    published = {4: -15.86536, 5: -50.63862, 6: -154.75622, 7: -467.39912, 8: -1405.15198, 9: -4218.33202}
    layers, X = nine_layers()
    x, R = X.mean(0), X - X.mean(0)
    log_r = math.log(np.linalg.norm(R))
    R = R / np.linalg.norm(R)
    for number, layer in enumerate(layers, 1):
        predicted = cubic_step(torch.from_numpy(R), layer.tensors, log_r)
        before = log_r
        x, R, log_r = reference.float_step(x, R, log_r, layer.heads, layer.scale)
        if number in published:
            assert round(log_r / LOG10, 5) == published[number]
            assert float(predicted.log_residual) / LOG10 == pytest.approx(log_r / LOG10, abs=5e-6)
            assert np.linalg.norm(predicted.direction.numpy() - R) < max(1e-14, 0.1 * math.exp(before))


@pytest.mark.parametrize(("with_base", "order"), [(False, 1), (True, 2)])
def test_error_falls_as_the_residual_or_as_its_square(with_base: bool, order: int) -> None:
    rng = np.random.default_rng(5)
    layer = random_layer(rng, dim=4, heads=2, d_qk=3, d_v=3)
    x, R = random_tokens(rng, 5, 4)
    errors = []
    with mp.workdps(120):
        for exponent in (-2, -3, -4):
            after = reference.residual(reference.attention(reference.tokens(x, R, exponent), layer.heads, layer.scale))
            base = torch.from_numpy(x) if with_base else None
            predicted = cubic_step(torch.from_numpy(R), layer.tensors, exponent * LOG10, base=base)
            errors.append(abs(float(reference.log_norm(after) - float(predicted.log_residual))))
    ratios = [errors[0] / errors[1], errors[1] / errors[2]]
    assert ratios == pytest.approx([10.0**order] * 2, rel=0.2)


def test_rank_one_closed_form() -> None:
    """R = u v^T: T(R) = (s/n) |u|^3 sum_h (v A_h v)(v W_h)."""
    rng = np.random.default_rng(7)
    layer = random_layer(rng, dim=5, heads=3, d_qk=2, d_v=2)
    u, v = rng.normal(size=6), rng.normal(size=5)
    u, v = u - u.mean(), v / np.linalg.norm(v)
    total = sum((v @ h["W_Q"] @ h["W_K"].T @ v) * (v @ h["W_V"] @ h["W_O"]) for h in layer.heads)
    want = math.log(layer.scale / 6 * np.linalg.norm(total))
    found = cubic_step(torch.from_numpy(np.outer(u, v)), layer.tensors).log_constant
    assert float(found) == pytest.approx(want, rel=1e-13)


def test_constant_does_not_depend_on_the_scale_nor_on_a_common_shift() -> None:
    rng = np.random.default_rng(8)
    layer = random_layer(rng, dim=4, heads=2, d_qk=3, d_v=3)
    R = torch.from_numpy(random_tokens(rng, 6, 4)[1])
    want = float(cubic_step(R, layer.tensors).log_constant)
    for scale in (1e-300, 1e-150, 1e150, 1e300):
        assert float(cubic_step(scale * R, layer.tensors).log_constant) == pytest.approx(want, abs=1e-13)
    assert float(cubic_step(R + torch.ones(4), layer.tensors).log_constant) == pytest.approx(want, abs=1e-12)


def test_a_batch_is_its_sequences() -> None:
    rng = np.random.default_rng(9)
    layer = random_layer(rng, dim=4, heads=2, d_qk=3, d_v=3)
    R = torch.from_numpy(np.stack([random_tokens(rng, 6, 4)[1] for _ in range(3)]))
    base, logs = torch.from_numpy(rng.normal(size=(3, 4))), torch.tensor([-1.0, -50.0, -5000.0], dtype=torch.float64)
    together = cubic_step(R, layer.tensors, logs, base=base)
    for i in range(3):
        alone = cubic_step(R[i], layer.tensors, logs[i], base=base[i])
        torch.testing.assert_close(together.log_residual[i], alone.log_residual, rtol=1e-14, atol=0)
        torch.testing.assert_close(together.direction[i], alone.direction, rtol=0, atol=1e-14)


def test_a_mask_breaks_the_law() -> None:
    """With a causal mask the residual stays of first order, far above the cubic prediction."""
    rng = np.random.default_rng(10)
    layer = random_layer(rng, dim=4, heads=1, d_qk=4, d_v=4)
    x, R = random_tokens(rng, 5, 4)
    head = layer.heads[0]
    X = x + 1e-3 * R
    scores = layer.scale * (X @ head["W_Q"] + head["b_Q"]) @ (X @ head["W_K"]).T
    P = np.exp(scores) * np.tril(np.ones((5, 5)))
    after = (P / P.sum(1, keepdims=True)) @ X @ head["W_V"] @ head["W_O"]
    exact = math.log(np.linalg.norm(after - after.mean(0)))
    assert exact > float(cubic_step(torch.from_numpy(R), layer.tensors, math.log(1e-3)).log_residual) + 5


def test_equal_tokens_and_vanishing_leading_terms_give_minus_infinity() -> None:
    one = torch.ones(1, 1, 1, dtype=torch.float64)
    heads = head_tensors(one, one, one, one)
    assert float(cubic_step(torch.zeros(3, 1), heads).log_residual) == -math.inf
    turn = torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]], dtype=torch.float64)
    eye = torch.eye(2, dtype=torch.float64).unsqueeze(0)
    skew = head_tensors(turn, eye, eye, eye)
    assert float(cubic_step(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]), skew).log_residual) == -math.inf


def test_weights_read_from_a_model_fit() -> None:
    rng = np.random.default_rng(11)
    plain = random_layer(rng, dim=4, heads=4, d_qk=2, d_v=2).tensors
    read = HeadWeights(
        W_Q=plain.W_Q.float(),
        W_K_groups=plain.W_K[::2].float(),
        W_V_groups=plain.W_V[::2].float(),
        W_O=plain.W_O.float(),
        b_Q=plain.b_Q.float(),
        b_K_groups=torch.ones(2, 2),
        b_V_groups=torch.ones(2, 2),
        b_O=torch.ones(4),
        kv_of_head=torch.tensor([0, 0, 1, 1]),
        scale=plain.scale,
        rotary=False,
        qk_norm=False,
    )
    grouped = head_tensors(
        read.W_Q, plain.W_K[[0, 0, 2, 2]].float(), plain.W_V[[0, 0, 2, 2]].float(), read.W_O, scale=plain.scale
    )
    R = torch.from_numpy(random_tokens(rng, 5, 4)[1])
    found, want = (float(cubic_step(R, heads).log_constant) for heads in (read, grouped))
    assert found == pytest.approx(want, abs=1e-14)


@pytest.mark.parametrize(("flag", "says"), [("rotary", "spectral law"), ("qk_norm", "Jacobians of the two norms")])
def test_scores_it_does_not_describe_are_refused(flag: str, says: str) -> None:
    one = torch.ones(1, 1, 1)
    heads = HeadTensors(one, one, one, one, torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1), 1.0, **{flag: True})
    with pytest.raises(InputError, match=says):
        cubic_step(torch.ones(2, 1), heads)


def test_shapes_and_values_are_refused_with_what_was_got() -> None:
    one = torch.ones(1, 1, 1)
    with pytest.raises(InputError, match=r"\(1, 2, 1\)"):
        cubic_step(torch.ones(2, 1), head_tensors(one, torch.ones(1, 2, 1), one, one))
    with pytest.raises(InputError, match="at least two tokens"):
        cubic_step(torch.ones(1, 1), head_tensors(one, one, one, one))
    with pytest.raises(InputError, match="not finite"):
        cubic_step(torch.tensor([[1.0], [math.nan]]), head_tensors(one, one, one, one))
