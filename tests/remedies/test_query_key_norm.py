"""``qk_norm``, which models ship with: the same as those models, refused where they have it, right when nested."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rankscope import Surgery
from rankscope.errors import UnsupportedOperationError
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


@pytest.mark.parametrize(
    ("family", "name", "words"),
    [
        ("tiny-qwen3", "qk_norm", "already has norms on its queries and keys: layers.0.self_attn.q_norm"),
        ("tiny-mamba", "qk_norm", "qk_norm needs attention"),
    ],
)
def test_what_a_model_has_or_cannot_have_is_refused_by_name(family: str, name: str, words: str) -> None:
    loaded = load(f"init:{family}")
    batch = prepare_inputs(loaded, None, sequences=2, tokens=8, batch=2)[0]
    view = view_of(loaded.model, batch)
    with pytest.raises(UnsupportedOperationError, match=words), applied(loaded.model, name, view=view):
        batch.run(loaded.model)


@pytest.mark.parametrize("carrier", ["eager", "sdpa"])
def test_a_temperature_acts_on_normed_queries_too(carrier: str) -> None:
    model, x = build("pre", carrier, True, 2), stream()
    with torch.no_grad(), operate(model, Surgery(temperature=2.0), inputs=x), applied(model, "qk_norm", strength=1.3):
        cooled = model(x)
    with torch.no_grad(), applied(model, "qk_norm", strength=0.65, inputs=x):
        assert relative(model(x), cooled) < 1e-13


@pytest.mark.parametrize("carrier", ["eager", "sdpa"])
def test_measured_attention_is_the_attention_that_ran(carrier: str) -> None:
    """The probabilities that the tracer sees are those of the normed queries and keys."""
    model, x = build("pre", carrier, True, 2), stream()
    seen: list[Tensor] = []

    def observe(ref: SiteRef, found: Tensor | AttentionCall) -> None:
        assert isinstance(found, AttentionCall)
        seen.append(found.probs())

    with torch.no_grad(), applied(model, "qk_norm", strength=0.5, inputs=x):
        view = view_of(model, prepare_inputs(load(model), x, sequences=2, tokens=7, batch=2, padding="none")[0])
        with trace(view, SiteSelection.parse(("attention.probs",)), observe):
            model(x)
    assert len(seen) == 2
    query, key, _ = split(model.blocks[0].attention, model.blocks[0].norm1(x))
    scores = 0.5 * math.sqrt(WIDTH) * F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT
    hidden = torch.ones(7, 7, dtype=torch.bool).triu(1)
    assert relative(seen[0], scores.masked_fill(hidden, -math.inf).softmax(dim=-1)) < 1e-12


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
