"""The weights of MLPs, read by family, against the modules that run."""

from __future__ import annotations

import pytest
import torch

from rankscope.errors import UnsupportedConfigError
from rankscope.ext.theory.mlp_weights import mlp_weights
from rankscope.models.loading import load


@pytest.mark.parametrize(
    ("name", "block", "gated"),
    [
        ("bert", "encoder.layer.0", False),
        ("gpt2", "h.0", False),
        ("llama", "layers.0", True),
        ("opt", "decoder.layers.0", False),
    ],
)
def test_the_mlp_that_was_read_is_the_one_that_runs(name: str, block: str, gated: bool) -> None:
    """Rebuilt from its matrices, without biases, against the modules themselves with their biases at zero."""
    loaded = load(f"init:tiny-{name}", dtype="float64")
    module = dict(loaded.model.named_modules())[block]
    for label, parameter in module.named_parameters():
        if label.endswith("bias"):
            parameter.data.zero_()
    read = mlp_weights(module, loaded.config)
    assert (read.W_gate is not None) == gated
    x = torch.randn(3, read.W_in.shape[0], dtype=torch.float64)
    from transformers.activations import ACT2FN

    act = ACT2FN[read.activation]
    inner = act(x @ read.W_in) if read.W_gate is None else act(x @ read.W_gate) * (x @ read.W_in)
    parts = dict(module.named_modules())
    runs = {
        "bert": lambda: parts["output.dense"](parts["intermediate"](x)),
        "gpt2": lambda: parts["mlp"](x[None])[0],
        "llama": lambda: parts["mlp"](x),
        "opt": lambda: parts["fc2"](act(parts["fc1"](x))),
    }
    assert torch.allclose(inner @ read.W_out, runs[name](), rtol=1e-12, atol=1e-14)


def test_the_radius_of_a_gated_mlp_holds_what_its_norm_lets_through() -> None:
    loaded = load("init:tiny-llama", dtype="float64")
    module = dict(loaded.model.named_modules())["layers.0"]
    norm = dict(module.named_modules())["post_attention_layernorm"]
    norm.weight.data.copy_(torch.linspace(0.2, 1.7, norm.weight.numel()))
    read = mlp_weights(module, loaded.config)
    out = norm(1e3 * torch.randn(500, norm.weight.numel(), dtype=torch.float64)).detach()
    assert float(torch.linalg.vector_norm(out, dim=-1).max()) <= read.radius


def test_experts_are_refused_with_a_sentence() -> None:
    loaded = load("init:tiny-mixtral")
    with pytest.raises(UnsupportedConfigError, match="cannot be read"):
        mlp_weights(dict(loaded.model.named_modules())["layers.0"], loaded.config)
