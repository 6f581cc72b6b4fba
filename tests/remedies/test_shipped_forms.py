"""Remedies that models ship with: the same as those models, refused where a model has them, right when nested."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope import Surgery
from rankscope.errors import InputError, UnsupportedOperationError
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.remedies import applied
from rankscope.stream.attention_calls import AttentionCall
from rankscope.stream.sites import SiteRef, SiteSelection
from rankscope.stream.tracer import trace
from rankscope.stream.viewing import view_of
from rankscope.surgery.operating import operate
from tests.surgery.written_out import WIDTH, build, split

IDS = torch.arange(24).reshape(2, 12) % 19
SHAPE = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 48, "vocab_size": 20, "max_position_embeddings": 32, "rms_norm_eps": 1e-14,
}  # fmt: skip

IN_FLOAT32 = 1e-5
"""The norms of these models compute in float32, whatever the weights are."""


def stream() -> Tensor:
    return torch.randn(2, 7, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


@pytest.mark.parametrize("kernel", ["sdpa", "eager"])
def test_qk_norm_makes_a_llama_a_qwen3(kernel: str) -> None:
    """Grouped heads and rotary positions: transformers' own Qwen3 norms before the rotation, we after it."""
    from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    llama = LlamaModel(LlamaConfig(**SHAPE, attn_implementation=kernel, initializer_range=0.3)).double().eval()
    qwen = Qwen3Model(Qwen3Config(**SHAPE, attn_implementation="eager")).double().eval()
    missing = qwen.load_state_dict(llama.state_dict(), strict=False).missing_keys
    assert {name.split(".")[-2] for name in missing} == {"q_norm", "k_norm"}
    with torch.no_grad():
        want = qwen(input_ids=IDS, use_cache=False).last_hidden_state
        with applied(llama, "qk_norm", inputs=IDS):
            got = llama(input_ids=IDS, use_cache=False).last_hidden_state
        bare = llama(input_ids=IDS, use_cache=False).last_hidden_state
    assert relative(got, want) < IN_FLOAT32
    assert relative(bare, want) > 1e-2


def gemma(cap: float | None) -> nn.Module:
    from transformers import Gemma2Config, Gemma2Model

    torch.manual_seed(0)
    config = Gemma2Config(
        **SHAPE, attn_logit_softcapping=cap, attn_implementation="eager", initializer_range=1.0, sliding_window=4,
        query_pre_attn_scalar=8,
    )  # fmt: skip
    return Gemma2Model(config).double().eval()


def test_logit_softcap_is_that_of_gemma2() -> None:
    with torch.no_grad():
        want = gemma(2.0)(input_ids=IDS, use_cache=False).last_hidden_state
        model = gemma(None)
        with applied(model, "logit_softcap", strength=2.0, inputs=IDS):
            got = model(input_ids=IDS, use_cache=False).last_hidden_state
        bare = model(input_ids=IDS, use_cache=False).last_hidden_state
    assert relative(got, want) < IN_FLOAT32
    assert relative(bare, want) > 1e-2


@pytest.mark.parametrize(
    ("family", "name", "words"),
    [
        ("tiny-qwen3", "qk_norm", "already has norms on its queries and keys: layers.0.self_attn.q_norm"),
        ("tiny-olmo2", "critical_temperature", "already has norms on its queries and keys"),
        ("tiny-gemma2", "logit_softcap", "already caps its scores: .*attn_logit_softcapping is 50"),
        ("tiny-gemma2", "peri_ln", "already has a norm on its attention branch"),
        ("tiny-olmo2", "peri_ln", "already has a norm on its attention branch"),
        ("tiny-bitnet", "attention_out_norm", "already has a norm on the output of attention: .*attn_sub_norm"),
        ("tiny-llama", "differential_attention", "rotary positions .*has to be built"),
        ("tiny-gpt-neox", "peri_ln", "peri_ln needs sequential"),
        ("tiny-mamba", "qk_norm", "qk_norm needs attention"),
    ],
)
def test_what_a_model_has_or_cannot_have_is_refused_by_name(family: str, name: str, words: str) -> None:
    loaded = load(f"init:{family}")
    batch = prepare_inputs(loaded, None, sequences=2, tokens=8, batch=2)[0]
    view = view_of(loaded.model, batch)
    with pytest.raises(UnsupportedOperationError, match=words), applied(loaded.model, name, view=view):
        batch.run(loaded.model)


class OutputNormed(nn.Module):
    """A branch whose norm is a function call and is followed by dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(12, 3, batch_first=True), nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        out = self.attention(y, y, y, need_weights=False)[0]
        return x + F.dropout(F.rms_norm(out, (12,)), 0.1, training=True)


def test_a_norm_on_a_branch_is_known_behind_dropout() -> None:
    model = nn.Sequential(OutputNormed(), OutputNormed()).double()
    with (
        pytest.raises(UnsupportedOperationError, match="already has a norm"),
        applied(model, "peri_ln", inputs=stream()),
    ):
        model(stream())


@pytest.mark.parametrize("carrier", ["eager", "sdpa"])
def test_a_cap_before_a_gain_is_not_a_gain_before_a_cap(carrier: str) -> None:
    model, x = build("pre", carrier, False, 1), stream()
    block = model.blocks[0]
    query, key, value = split(block.attention, block.norm1(x))
    scores, length = query @ key.mT / math.sqrt(WIDTH), math.log(7)
    want = {"logit_softcap": length * torch.tanh(scores), "log_n_scale": torch.tanh(length * scores)}
    for first, second in (("logit_softcap", "log_n_scale"), ("log_n_scale", "logit_softcap")):
        with torch.no_grad(), applied(model, first, strength=1.0, inputs=x), applied(model, second, strength=1.0):
            got = model(x)
        mixed = (want[first].softmax(dim=-1) @ value).transpose(1, 2).reshape(x.shape)
        out = x + block.attention.weights.out_proj(mixed)
        assert relative(got, model.norm(out + block.mlp(block.norm2(out)))) < 1e-12


@pytest.mark.parametrize("carrier", ["eager", "sdpa"])
def test_a_temperature_acts_on_normed_queries_too(carrier: str) -> None:
    model, x = build("pre", carrier, True, 2), stream()
    with torch.no_grad(), operate(model, Surgery(temperature=2.0), inputs=x), applied(model, "qk_norm", strength=1.3):
        cooled = model(x)
    with torch.no_grad(), applied(model, "qk_norm", strength=0.65, inputs=x):
        assert relative(model(x), cooled) < 1e-13


@pytest.mark.parametrize("carrier", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["logit_softcap", "qk_norm", "differential_attention"])
def test_measured_attention_is_the_attention_that_ran(name: str, carrier: str) -> None:
    """The probabilities the tracer sees, times the values, are what attention returned."""
    model, x = build("pre", carrier, True, 2), stream()
    if carrier == "eager" and name == "differential_attention":
        pytest.skip("refused; see the hand-written networks")
    seen: list[Tensor] = []
    mixed: list[Tensor] = []

    def observe(ref: SiteRef, found: Tensor | AttentionCall) -> None:
        assert isinstance(found, AttentionCall)
        seen.append(found.probs())

    with torch.no_grad(), applied(model, name, strength=0.5, inputs=x) as given:
        view = view_of(model, prepare_inputs(load(model), x, sequences=2, tokens=7, batch=2, padding="none")[0])
        if name == "differential_attention":
            given.grafts[0].attended = lambda at, heard: mixed.append(heard.out) or heard.out
        with trace(view, SiteSelection.parse(("attention.probs",)), observe):
            model(x)
    value = split(model.blocks[0].attention, model.blocks[0].norm1(x))[2]
    assert len(seen) == 2
    if name == "differential_attention":
        assert relative(seen[0] @ value, mixed[0]) < 1e-12
        assert torch.allclose(seen[0].sum(dim=-1), torch.full((2, 3, 7), 1 - 0.5 * 0.2, dtype=torch.float64))
    else:
        query, key, _ = split(model.blocks[0].attention, model.blocks[0].norm1(x))
        scores = query @ key.mT / math.sqrt(WIDTH)
        scores = 0.5 * torch.tanh(scores / 0.5)
        if name == "qk_norm":
            scores = 0.5 * math.sqrt(WIDTH) * F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
        hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
        assert relative(seen[0], scores.masked_fill(hidden, -math.inf).softmax(dim=-1)) < 1e-12


def test_centring_a_difference_of_two_softmaxes_is_refused() -> None:
    model, x = build("pre", "sdpa", False, 1), stream()
    nested = operate(model, Surgery(attention="centred"), inputs=x), applied(model, "differential_attention", inputs=x)
    with nested[0], nested[1], pytest.raises(UnsupportedOperationError, match="weighted sum of several softmaxes"):
        model(x)


class TensorScaled(nn.Module):
    """Eager attention with a learned temperature: what its scale is cannot be told from outside."""

    def __init__(self, scale: Tensor | float) -> None:
        super().__init__()
        self.scale, self.mix, self.norm = scale, nn.Linear(12, 36), nn.LayerNorm(12)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.norm(x)).view(*x.shape[:2], 3, 3, 4).permute(2, 0, 3, 1, 4)
        scores = (query @ key.mT) * self.scale
        return x + (scores.softmax(dim=-1) @ value).transpose(1, 2).reshape(x.shape)


def test_eager_scores_scaled_by_a_tensor_are_refused() -> None:
    for scale in (0.5, torch.tensor(0.5, dtype=torch.float64)):
        model = nn.Sequential(TensorScaled(scale)).double()
        with torch.no_grad(), applied(model, "qk_norm", inputs=stream()):
            model(stream())
    model = nn.Sequential(TensorScaled(torch.rand(3, 1, 1, dtype=torch.float64))).double()
    with applied(model, "qk_norm", inputs=stream()), pytest.raises(UnsupportedOperationError, match="pass through mul"):
        model(stream())


@pytest.mark.parametrize(("name", "strength"), [("logit_softcap", 0.0), ("logit_softcap", -1.0)])
def test_a_cap_is_above_zero(name: str, strength: float) -> None:
    with (
        pytest.raises(InputError, match="above 0"),
        applied(build("pre", "sdpa", False), name, strength=strength, inputs=stream()),
    ):
        pass


def test_the_stream_under_peri_ln_grows_by_one_per_branch() -> None:
    """At initialisation branches are uncorrelated with the stream: its mean square is q_0 + 2 l after l blocks."""
    loaded = load("init:tiny-gpt2", dtype=torch.float64, seed=1)
    batch = prepare_inputs(loaded, None, sequences=4, tokens=16, batch=4)[0]
    view = view_of(loaded.model, batch)
    sizes: dict[str, float] = {}

    def observe(ref: SiteRef, x: Tensor | AttentionCall) -> None:
        assert isinstance(x, Tensor)
        sizes[str(ref)] = float(x.square().mean())

    sites = SiteSelection.parse(("block.in@0", "block.out"))
    with torch.no_grad(), applied(loaded.model, "peri_ln", view=view), trace(view, sites, observe):
        batch.run(loaded.model)
    first, *rest = sizes.values()
    for block, size in enumerate(rest, start=1):
        assert size == pytest.approx(first + 2 * block, rel=0.15)
