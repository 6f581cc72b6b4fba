"""Verbs that need the weights of heads, on a GPT-2 whose blocks write their skips in hostile forms.

``decompose`` is compared with path sums found without any recursion: with attention, norms and MLPs held at what they
were, the stream is a polynomial in a factor on all heads, and the sum over paths of length k is its k-th coefficient.
``bound`` is compared with the same weights in a model that writes ``x + f(x)``.
"""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

import rankscope as rs
from rankscope.runs.rows import only
from tests.hostile import twin as plain
from tests.hostile.harness import TOLERANCE, names_a_part
from tests.hostile.parts import ids

DIM, HEADS, DEPTH = 8, 2, 2


class Hostile(GPT2Block):
    """Carries ``carry`` times the stream and adds ``add`` times the branch."""

    carry, add = 1.0, 1.0

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + branch

    def forward(
        self, x: Tensor, past: object = None, attention_mask: Tensor | None = None, *others: object, **given: object
    ) -> Tensor:
        x = self.join(x, self.attn(self.ln_1(x), attention_mask=attention_mask)[0])
        return self.join(x, self.mlp(self.ln_2(x)))


class AlphaOne(Hostile):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.add(x, branch, alpha=1.0)


class Alpha(Hostile):
    add = 0.7

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.add(x, branch, alpha=0.7)


class Gain(Hostile):
    carry, add = 0.8, 0.6

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return 0.8 * x + 0.6 * branch


class SubNegative(Hostile):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return x - (-branch)


class Lerp(Hostile):
    carry, add = 0.6, 0.4

    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.lerp(x, branch, 0.4)


class StackSum(Hostile):
    def join(self, x: Tensor, branch: Tensor) -> Tensor:
        return torch.stack([x, branch]).sum(0)


class Long(Hostile):
    """The last block reads the input of the first again."""

    memory: list[Tensor]

    def forward(self, x: Tensor, *others: object, **given: object) -> Tensor:
        if self.memory:
            x = x + self.memory.pop()
        else:
            self.memory.append(x)
        return super().forward(x, *others, **given)


FORMS = (Hostile, AlphaOne, Alpha, Gain, SubNegative, Lerp, StackSum, Long)
THEOREMS = ("contraction_interval", "skip_interval", "dong_2021_skip")
MUST_BE_EQUAL = (Hostile, AlphaOne, Alpha, Gain)


def network(form: type[Hostile]) -> GPT2Model:
    config = GPT2Config(
        n_layer=DEPTH, n_embd=DIM, n_head=HEADS, vocab_size=40, n_positions=16, bos_token_id=0, eos_token_id=0
    )
    model = GPT2Model(config).double().eval()
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            is_norm = ".ln_" in name or name.startswith("ln_")
            parameter.copy_(0.9 + 0.2 * noise if parameter.dim() == 1 else noise / 2)
            if parameter.dim() == 1 and "bias" in name:
                # A norm's bias and a value's bias would start paths inside a head: left out.
                parameter.copy_(torch.zeros_like(parameter) if is_norm or "c_attn" in name else 0.2 * noise)
    memory: list[Tensor] = []
    for block in model.h:
        block.__class__ = form
        block.memory = memory
    # A pass that was broken off must not leave its states to the next one.
    model.register_forward_pre_hook(lambda *_: memory.clear())
    return model


def affine(layer: nn.Module, x: Tensor) -> Tensor:
    return x @ layer.weight + layer.bias


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def path_sums(model: GPT2Model, given: Tensor, gain: float) -> list[Tensor]:
    """The sums over paths of length 0, 1, 2 behind the last norm; ``gain`` is on every skip."""
    with torch.no_grad():
        frozen = _run(model, given, gain, 1.0, None)
        values = [_run(model, given, gain, factor, frozen)["out"][0] for factor in (0.0, 1.0, 2.0)]
    powers = torch.tensor([[factor**k for k in range(3)] for factor in (0.0, 1.0, 2.0)], dtype=torch.float64)
    return list(torch.einsum("kf,fbtd->kbtd", torch.linalg.inv(powers), torch.stack(values)))


def _run(
    model: GPT2Model, given: Tensor, gain: float, factor: float, frozen: dict[str, list[Tensor]] | None
) -> dict[str, list[Tensor]]:
    """One pass, in which everything that is not linear is taken from ``frozen`` or noted."""
    noted: dict[str, list[Tensor]] = {"scale": [], "probs": [], "mlp": [], "out": []}
    take = {name: iter(values) for name, values in (frozen or {}).items()}

    def hold(name: str, own: Tensor) -> Tensor:
        noted[name].append(own)
        return own if frozen is None else next(take[name])

    def norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred * hold("scale", (centred.pow(2).mean(-1, keepdim=True) + layer.eps).rsqrt()) * layer.weight

    x = first = model.wte.weight[given] + model.wpe.weight[: given.shape[1]]
    for number, block in enumerate(model.h):
        if isinstance(block, Long) and number:
            x = x + gain * first
        q, k, v = (plain.split(part, HEADS) for part in affine(block.attn.c_attn, norm(block.ln_1, x)).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        probs = hold("probs", plain.softmax(scores, plain.later(given.shape[1])))
        mixed = factor * plain.merge(probs @ v)
        x = gain * block.carry * x + block.add * affine(block.attn.c_proj, mixed)
        mlp = affine(block.mlp.c_proj, tanh_gelu(affine(block.mlp.c_fc, norm(block.ln_2, x))))
        x = gain * block.carry * x + block.add * hold("mlp", mlp)
    noted["out"].append(norm(model.ln_f, x))
    return noted


def refused(model: nn.Module, form: type[Hostile], error: rs.RankscopeError) -> None:
    assert names_a_part(str(error), model), f"a refusal that names no part of the model: {error}"
    assert form not in MUST_BE_EQUAL, f"refused, and must be equal: {error}"


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_the_twin_is_the_network(form: type[Hostile]) -> None:
    model, given = network(form), ids()
    with torch.no_grad():
        out = model(given).last_hidden_state
        assert torch.allclose(out, _run(model, given, 1.0, 1.0, None)["out"][0], rtol=1e-10, atol=1e-12)
    assert torch.allclose(out, sum(path_sums(model, given, 1.0)), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("gain", [1.0, 0.5])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_decompose_is_equal_or_refused(form: type[Hostile], gain: float) -> None:
    model, given = network(form), ids()
    try:
        with nullcontext() if gain == 1.0 else rs.operate(model, rs.Surgery(skip=gain)):
            run = rs.decompose(model, given, metrics=["relative_residual"])
    except rs.RankscopeError as error:
        refused(model, form, error)
        return
    rows = only(run.table, metric="relative_residual", site="final").to_pylist()
    ours = {(row["length"], row["sequence"]): row["value"] for row in rows if row["paths"] == "of a length"}
    for length, total in enumerate(path_sums(model, given, gain)):
        for sequence, x in enumerate(total):
            by_hand = float((x - x.mean(0)).norm() / x.norm())
            assert ours[length, sequence] == pytest.approx(by_hand, rel=TOLERANCE), (length, sequence)


@pytest.mark.parametrize("form", [AlphaOne, SubNegative, StackSum], ids=lambda form: form.__name__)
def test_bound_is_equal_or_refused(form: type[Hostile]) -> None:
    model, given = network(form), ids()
    try:
        run = rs.bound(model, given, theorems=THEOREMS)
    except rs.RankscopeError as error:
        refused(model, form, error)
        return
    expected = rs.bound(network(Hostile), given, theorems=THEOREMS)
    assert run.table.drop_columns("value").equals(expected.table.drop_columns("value"))
    for ours, theirs in zip(run.table["value"].to_pylist(), expected.table["value"].to_pylist(), strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE, nan_ok=True)
