"""Blocks read from safetensors one after the other, MLPs read by family, and files that are not what they claim."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from rankscope.errors import LoadError, UnsupportedConfigError
from rankscope.ext.theory.lazy_blocks import lazy_model
from rankscope.ext.theory.mlp_weights import mlp_weights
from rankscope.models.heads import head_weights
from rankscope.models.loading import load


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("bert", "encoder.layer.{}"),
        ("gpt2", "h.{}"),
        ("llama", "layers.{}"),
        ("phi3", "layers.{}"),
        ("gpt-neox", "layers.{}"),
        ("xlnet", "layer.{}"),
    ],
)
def test_lazy_weights_are_the_model_s(name: str, blocks: str, tmp_path: Path) -> None:
    loaded = load(f"init:tiny-{name}")
    loaded.model.save_pretrained(tmp_path)
    modules = dict(loaded.model.named_modules())
    found = list(lazy_model(tmp_path).blocks())
    assert [block.layers for block in found] == [(number,) for number in range(len(found))]
    for block in found:
        own = head_weights(modules[blocks.format(block.layers[0])], loaded.config)
        lazy = head_weights(block.module, loaded.config)
        for part in ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_V", "b_O"):
            assert torch.equal(getattr(own, part), getattr(lazy, part)), part


def test_a_shared_block_is_read_once_and_runs_in_every_layer(tmp_path: Path) -> None:
    loaded = load("init:tiny-albert")
    loaded.model.save_pretrained(tmp_path)
    (block,) = lazy_model(tmp_path).blocks()
    assert block.layers == tuple(range(loaded.config.num_hidden_layers))


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    loaded = load("init:tiny-llama")
    loaded.model.save_pretrained(tmp_path)
    block = next(iter(lazy_model(tmp_path).blocks()))
    names = {name.split(".")[0] for name, _ in block.module.named_parameters()}
    assert names == {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


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


def test_files_that_are_not_what_they_claim_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"has no \*.safetensors"):
        lazy_model(tmp_path)
    load("init:tiny-bert").model.save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 40)
    with pytest.raises(LoadError, match="not a safetensors file"):
        lazy_model(tmp_path)


def test_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    load("init:tiny-gpt2").model.save_pretrained(tmp_path)
    described = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "vocab_size": described["vocab_size"]}))
    with pytest.raises(LoadError, match="holds no parameter that ends in"):
        list(lazy_model(tmp_path).blocks())


def test_a_model_of_two_stacks_is_refused(tmp_path: Path) -> None:
    load("init:tiny-t5", model_class="T5ForConditionalGeneration").model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedConfigError, match="two blocks number 0"):
        list(lazy_model(tmp_path).blocks())
