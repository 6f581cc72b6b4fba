"""The picture against the library's own verbs, closed forms and brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import rankscope
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.ext.playground.choices import Choices
from rankscope.ext.playground.model import Transformer, first_tokens
from rankscope.ext.playground.simulating import simulate
from rankscope.linalg.attention_weights import head_tensors
from rankscope.linalg.cubic_law import cubic_step

LOG10 = math.log(10)
SMALL = {"depth": 6, "tokens": 12, "width": 16, "heads": 2}
PURE = {"skip_gain": 0.0, "mlp": "none", "norm": "none"}
NETWORKS = {
    "post-norm": {},
    "no skips": {"skip_gain": 0.0},
    "attention alone": PURE,
    "pre-norm, causal, rotary": {"norm_place": "pre", "mask": "causal", "positions": "rope", "skip_gain": 0.5},
    "rms, gated, linear positions": {"norm": "rmsnorm", "mlp": "swiglu", "positions": "alibi"},
    "relu, window, no norm": {"norm": "none", "mlp": "relu", "mask": "window(4)", "positions": "learned"},
    "sink": {"mask": "causal_window(4) | sink(1)", "skip_gain": 0.0, "seed": 3},
}


def states_of(choices: Choices) -> tuple[Transformer, list[Deviation]]:
    design = choices.design()
    model = Transformer(design, choices.seed)
    states = [Deviation.from_tokens(first_tokens(design, choices.seed))]
    with torch.no_grad():
        for block in model.blocks:
            states.append(block(states[-1]).recentred())
    return model, states


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", NETWORKS)
def test_the_curve_is_that_of_rankscope_exact_on_the_same_module(name: str) -> None:
    chosen = Choices(**SMALL, **NETWORKS[name])
    design = chosen.design()
    module, tokens = Transformer(design, chosen.seed), first_tokens(design, chosen.seed)
    run = rankscope.exact(module, tokens, plain=False)
    picture = simulate(chosen)
    exact = run.curve("log10_relative_residual", "block.out").mean
    np.testing.assert_allclose(picture.course.log10_relative[1:], exact, rtol=1e-8)
    if exact[-1] < -6:
        # exact() draws the first tokens together, the picture the block's own input: directions differ a little
        assert picture.course.order[-1] == pytest.approx(run.curve("order", "block.out").mean[-1], abs=0.05)


@pytest.mark.parametrize("name", ["post-norm", "pre-norm, causal, rotary", "relu, window, no norm"])
def test_the_curve_above_the_floor_is_that_of_float64(name: str) -> None:
    chosen = Choices(**{**SMALL, "depth": 3}, **NETWORKS[name])
    design = chosen.design()
    module, x = Transformer(design, chosen.seed), first_tokens(design, chosen.seed)
    for block, seen in zip([None, *module.blocks], simulate(chosen).course.log10_relative, strict=True):
        x = x if block is None else block(x)
        relative = (x - x.mean(1, keepdim=True)).norm() / x.norm()
        assert seen == pytest.approx(math.log10(float(relative)), rel=1e-9, abs=1e-12)


def test_skip_gain_zero_gives_order_three_and_one_gives_order_one() -> None:
    cut, whole = simulate(Choices(**SMALL, skip_gain=0.0)), simulate(Choices(**SMALL))
    assert (cut.order, set(cut.law.order)) == (3, {3})
    assert cut.course.order[-1] == pytest.approx(3, abs=1e-6)
    assert math.isnan(cut.factor)
    assert (whole.order, set(whole.law.order)) == (1, {1})
    assert 0 < whole.factor < 1


@pytest.mark.parametrize("mask", ["causal", "window(4)"])
def test_a_mask_takes_the_cube_away(mask: str) -> None:
    picture = simulate(Choices(**{**SMALL, "depth": 16}, **PURE, mask=mask))
    assert set(picture.law.order) == {1}
    assert picture.course.order[-1] == pytest.approx(1, abs=1e-3)


def test_a_skip_that_grows_differences_is_no_collapse() -> None:
    picture = simulate(Choices(**SMALL, mlp="none", norm="none", weight_scale=0.1, skip_gain=-1.0))
    assert picture.factor == pytest.approx(1, abs=0.02)
    assert picture.order == (0 if picture.factor >= 1 else 1)


def test_the_law_of_attention_alone_is_the_cubic_law_of_its_weights() -> None:
    chosen = Choices(**{**SMALL, "depth": 8}, **PURE)
    model, states = states_of(chosen)
    law = simulate(chosen).law
    small = [k for k, state in enumerate(states[:-1]) if state.log_residual() - state.log_norm() < math.log(1e-4)]
    assert len(small) >= 2
    for number in small:
        block, before, after = model.blocks[number], states[number], states[number + 1]
        split = [
            part.weight.T.reshape(16, 2, 8).permute(1, 0, 2)
            for part in (block.attention.query, block.attention.key, block.attention.value)
        ]
        heads = head_tensors(*split, block.attention.out.weight.T.reshape(2, 8, 16))
        term = before.terms[0]
        predicted = float(cubic_step(term.values[0], heads, term.log_scale).log_residual) - after.log_norm()
        assert law.log10_relative[number] == pytest.approx(predicted / LOG10, rel=1e-9, abs=1e-3)


@pytest.mark.parametrize("name", ["post-norm", "pre-norm, causal, rotary", "sink"])
def test_the_linear_law_is_the_derivative_at_the_collapsed_point(name: str) -> None:
    chosen = Choices(**SMALL, **NETWORKS[name])
    model, states = states_of(chosen)
    picture = simulate(chosen)
    for number in (0, 3, 5):
        before = states[number]
        term = before.terms[0]
        direction = term.values.expand(before.shape)
        base = before.base.expand(before.shape).contiguous()
        out, moved = torch.func.jvp(model.blocks[number], (base,), (direction.contiguous(),))
        moved = moved - moved.mean(1, keepdim=True)
        factor = (moved.norm() / direction.norm()) * (base.norm() / out.norm())
        predicted = picture.course.log10_relative[number] + math.log10(float(factor))
        assert picture.law.log10_relative[number] == pytest.approx(predicted, abs=1e-8)


def test_the_law_comes_true_as_tokens_come_together() -> None:
    picture = simulate(Choices(**SMALL, skip_gain=0.0))
    miss = np.abs(np.array(picture.law.log10_relative) - picture.course.log10_relative[1:])
    assert miss[0] > 0.1
    small = np.array(picture.course.log10_relative[:-1]) < -4
    assert small.any()
    assert (miss[small] < 1e-3).all()


def test_floors_are_reached_where_the_exact_curve_says() -> None:
    picture = simulate(Choices(**SMALL, **PURE))
    assert list(picture.sights) == ["bfloat16", "float32"]
    for name, digits in (("bfloat16", 7), ("float32", 23)):
        sight = picture.sights[name]
        assert sight.floor == 4 * 2.0**-digits
        below = [k for k, value in enumerate(picture.course.log10_relative) if k and value <= math.log10(sight.floor)]
        assert sight.block == below[0] - 1  # the first entry is before block 0
    assert picture.sights["float32"].block > 0


def test_floats_read_what_a_forward_pass_in_that_format_gives() -> None:
    chosen = Choices(**SMALL)
    design = chosen.design()
    module, x = Transformer(design, 0).float(), first_tokens(design, 0).float()
    for block, seen in zip(module.blocks, simulate(chosen).sights["float32"].log10_relative[1:], strict=True):
        x = block(x)
        wide = x.double()
        relative = (wide - wide.mean(1, keepdim=True)).norm() / wide.norm()
        assert seen == pytest.approx(math.log10(float(relative)), rel=1e-9, abs=1e-12)


def test_the_same_seed_gives_the_same_picture_and_another_seed_another() -> None:
    small = Choices(**SMALL, seed=5)
    assert simulate(small) == simulate(small)
    assert simulate(small).course != simulate(Choices(**SMALL, seed=6)).course


@pytest.mark.parametrize("sizes", [{"depth": 1, "tokens": 2}, {"depth": 48, "tokens": 2}, {"depth": 2, "tokens": 64}])
def test_the_ends_of_the_ranges(sizes: dict[str, int]) -> None:
    picture = simulate(Choices(width=16, heads=1, skip_gain=0.0, **sizes))
    assert len(picture.frames) == len(picture.course.log10_relative) == sizes["depth"] + 1
    assert not any(math.isnan(value) for value in picture.course.log10_relative)
