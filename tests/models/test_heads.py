"""Head weights against the models themselves: attention recomputed head by head from P, X and the weights."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import transformers
from torch import nn

from rankscope.errors import UnsupportedConfigError
from rankscope.models.heads import HeadWeights, head_weights
from rankscope.models.heads.family import FAMILIES, REFUSED, Family
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import LoadedModel, load
from rankscope.models.loading.dtypes import default_dtype
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.models.presets import PRESETS
from tests.tiny_presets import TINY_PRESETS

TINY_OF_TYPE: dict[str, str] = {}
for _name in TINY_PRESETS:
    TINY_OF_TYPE.setdefault(PRESETS[_name].model_type, _name)
CASES = [(family.name, model_type) for family in FAMILIES.values() for model_type in family.model_types]
# Where P follows from the weights alone: no rotation, no norm of queries, no term added to the scores.
BILINEAR = [(name, kind) for name, kind in CASES if FAMILIES[name].position == "none" and not FAMILIES[name].qk_norm]


@dataclass
class Seen:
    """One block's attention: what went in, the probabilities, what came out."""

    block: nn.Module
    x: torch.Tensor
    p: torch.Tensor
    out: torch.Tensor


def first_block(model: nn.Module, family: Family) -> tuple[str, nn.Module]:
    """The first module that holds the family's output projection under its path."""
    ending = f".{family.output}.weight" if family.layout != "einsum" else f".{family.output}"
    names = [name for name, _ in model.named_parameters() if name.endswith(ending)]
    prefix = names[0].removesuffix(ending)
    return prefix, model.get_submodule(prefix)


def in_float64(model_type: str) -> LoadedModel:
    """XLNet makes its positions in float32; they are cast on their way into attention."""
    spec = f"init:{TINY_OF_TYPE[model_type]}"
    if model_type != "xlnet":
        return load(spec, dtype="float64")
    model = load(spec).model.double()
    for name, module in model.named_modules():
        if name.endswith("rel_attn"):
            module.register_forward_pre_hook(lambda _m, args: tuple(_double(entry) for entry in args))
    return load(model)


def _double(entry: object) -> object:
    return entry.double() if isinstance(entry, torch.Tensor) and entry.is_floating_point() else entry


def perturbed(loaded: LoadedModel) -> LoadedModel:
    """Biases and gains start at 0 and 1, which would hide a misplaced one."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return loaded


def observe(loaded: LoadedModel, family: Family) -> Seen:
    """Run the model once in eager mode and look at its first block."""
    model = loaded.model
    _, block = first_block(model, family)
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str, value: torch.Tensor) -> None:
        seen.setdefault(name, value)

    if family.layout == "einsum":
        source = target = block.get_submodule("rel_attn")
    else:
        source, target = block.get_submodule(family.projections[-1]), block.get_submodule(family.output)
    hooks = [
        source.register_forward_pre_hook(lambda _m, args: keep("x", args[0])),
        target.register_forward_hook(lambda _m, _a, out: keep("out", out[0] if family.layout == "einsum" else out)),
    ]
    with quiet_transformers(), torch.no_grad(), default_dtype(torch.float64):
        model.set_attn_implementation("eager")
        prepared = prepare_inputs(
            loaded, sequences=2, tokens=9, random_tokens=loaded.input_kind in ("text", "text-to-text")
        )
        output = model(**prepared[0].inputs, output_attentions=True)
    for hook in hooks:
        hook.remove()
    found = output.get("attentions")
    found = found if found is not None else output["encoder_attentions"]
    if not found and transformers.__version__.startswith("5.18."):
        pytest.skip("transformers 5.18 gives out no attentions of this family")
    return Seen(block, seen["x"], found[0], seen["out"])


def attention(x: torch.Tensor, p: torch.Tensor, w: HeadWeights) -> torch.Tensor:
    """The sum over heads, written as a loop."""
    total = torch.zeros_like(x[..., :1]) + w.b_O
    for head in range(w.heads):
        group = int(w.kv_of_head[head])
        value = x @ w.W_V_groups[group] + w.b_V_groups[group]
        total = total + p[:, head] @ value @ w.W_O[head]
    return total


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "model_type"), CASES)
def test_attention_is_the_sum_over_heads(name: str, model_type: str) -> None:
    family = FAMILIES[name]
    loaded = perturbed(in_float64(model_type))
    seen = observe(loaded, family)
    weights = head_weights(seen.block, loaded.config)
    if family.layout == "einsum":
        x = seen.x.transpose(0, 1)
        expected = seen.out.transpose(0, 1)
        with torch.no_grad():
            got = seen.block.get_submodule("rel_attn.layer_norm")(x + attention(x, seen.p, weights))
    else:
        expected, got = seen.out, attention(seen.x, seen.p, weights)
    assert got.shape == expected.shape
    assert float((got - expected).norm() / expected.norm()) < 1e-10


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "model_type"), BILINEAR)
def test_probabilities_follow_from_query_and_key_weights(name: str, model_type: str) -> None:
    family = FAMILIES[name]
    loaded = perturbed(load(f"init:{TINY_OF_TYPE[model_type]}", dtype="float64"))
    seen = observe(loaded, family)
    w = head_weights(seen.block, loaded.config)
    for head in range(w.heads):
        query, key = seen.x @ w.W_Q[head] + w.b_Q[head], seen.x @ w.W_K[head] + w.b_K[head]
        scores = w.scale * query @ key.transpose(-1, -2)
        scores = scores.masked_fill(seen.p[:, head] == 0, -torch.inf)
        # Some models take the softmax in float32.
        torch.testing.assert_close(scores.softmax(dim=-1), seen.p[:, head], rtol=1e-5, atol=1e-7)


def test_weights_are_views_and_groups_are_shared() -> None:
    loaded = load("init:tiny-llama")
    block = loaded.model.get_submodule("layers.0")
    w = head_weights(block, loaded.config)
    assert (
        w.W_Q.untyped_storage().data_ptr()
        == block.get_parameter("self_attn.q_proj.weight").untyped_storage().data_ptr()
    )
    assert (w.W_Q.shape, w.W_K_groups.shape, w.W_K.shape, w.W_O.shape) == (
        (4, 32, 8),
        (2, 32, 8),
        (4, 32, 8),
        (4, 8, 32),
    )
    assert w.kv_of_head.tolist() == [0, 0, 1, 1]
    assert torch.equal(w.W_V[1], w.W_V[0])
    assert not torch.equal(w.W_V[1], w.W_V[2])
    assert w.rotary
    assert not w.W_Q.requires_grad


@pytest.mark.parametrize(
    "architecture", [{"new_decoder_architecture": True, "num_kv_heads": 2}, {"multi_query": False}]
)
def test_falcon_in_its_other_layouts(architecture: dict[str, object]) -> None:
    import transformers

    config = transformers.FalconConfig(**{**PRESETS["tiny-falcon"].config, **architecture})
    torch.manual_seed(0)
    loaded = perturbed(load(transformers.FalconModel(config).double().eval()))
    seen = observe(loaded, FAMILIES["falcon"])
    weights = head_weights(seen.block, config)
    assert weights.W_K_groups.shape[0] == architecture.get("num_kv_heads", 4)
    torch.testing.assert_close(attention(seen.x, seen.p, weights), seen.out, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("preset", "key", "value"),
    [
        ("tiny-gpt2", "scale_attn_by_inverse_layer_idx", True),
        ("tiny-olmo", "clip_qkv", 1.0),
        ("tiny-roformer", "rotary_value", True),
    ],
)
def test_configuration_that_is_not_understood_is_named(preset: str, key: str, value: object) -> None:
    loaded = load(f"init:{preset}")
    setattr(loaded.config, key, value)
    with pytest.raises(UnsupportedConfigError, match=f"{key}={value}"):
        head_weights(loaded.model, loaded.config)


def test_nested_configuration_is_checked_too() -> None:
    loaded = load("init:tiny-mpt")
    assert loaded.config is not None
    loaded.config.attn_config.clip_qkv = 2.0
    with pytest.raises(UnsupportedConfigError, match=r"attn_config\.clip_qkv=2\.0"):
        head_weights(loaded.model, loaded.config)


@pytest.mark.parametrize("model_type", sorted(set(REFUSED) & set(TINY_OF_TYPE)))
def test_refused_architectures_say_why(model_type: str) -> None:
    loaded = load(f"init:{TINY_OF_TYPE[model_type]}")
    with pytest.raises(UnsupportedConfigError, match="cannot be read") as caught:
        head_weights(loaded.model, loaded.config)
    assert REFUSED[model_type] in str(caught.value)


def test_a_module_that_is_no_block_is_answered() -> None:
    loaded = load("init:tiny-bert")
    with pytest.raises(UnsupportedConfigError, match="Pass one block"):
        head_weights(loaded.model, loaded.config)


def test_a_model_of_two_towers_is_read_by_the_part_the_block_belongs_to() -> None:
    import transformers

    text, vision = (
        dict(PRESETS["tiny-clip-text"].config),
        {**PRESETS["tiny-clip-vision"].config, "num_attention_heads": 2},
    )
    config = transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)
    model = transformers.CLIPModel(config)
    heads = {
        name.split(".")[0]: head_weights(module, config).heads
        for name, module in model.named_modules()
        if name.endswith("layers.0")
    }
    assert heads == {"text_model": 4, "vision_model": 2}
