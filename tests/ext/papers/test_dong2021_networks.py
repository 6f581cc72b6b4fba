"""The authors' networks, against a slow re-computation of each block from the model's own parts."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from rankscope.errors import UnsupportedOperationError
from rankscope.ext.papers.dong2021_fig2.run import AUTHORS, NETWORKS, FigureNetwork, mlp_taken_out
from rankscope.ext.papers.measuring.network import measure_network
from rankscope.metrics.composite_residual import relative_composite_residual
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import LoadedModel, load
from rankscope.runs.rows import RowWriter
from rankscope.verbs.ablate.variants import variant_named

CLOSE = {"rtol": 1e-10, "atol": 0.0}


def attended(attention: nn.Module, x: Tensor, heads: int) -> Tensor:
    """Multi-head attention from the weights, without the output projection."""
    query, key, value = (
        part(x).unflatten(-1, (heads, -1)).transpose(1, 2) for part in (attention.query, attention.key, attention.value)
    )
    scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    return (scores.softmax(dim=-1) @ value).transpose(1, 2).flatten(-2)


def bert_states(model: nn.Module, ids: Tensor, network: FigureNetwork) -> list[Tensor]:
    """Whatever enters and leaves the blocks of BERT when its skips and MLPs are cut as the authors cut them."""
    x = model.embeddings(input_ids=ids)
    states = [x]
    skip = network.operation.attention_skip
    for layer in model.encoder.layer:
        out = layer.attention.output
        x = out.LayerNorm(skip * x + out.dense(attended(layer.attention.self, x, model.config.num_attention_heads)))
        if not network.without_mlp:
            x = layer.output.LayerNorm(x + layer.output.dense(layer.intermediate(x)))
        states.append(x)
    return states


def albert_states(model: nn.Module, ids: Tensor, network: FigureNetwork) -> list[Tensor]:
    """The same for ALBERT, where the activation, the skip and the norm of the MLP outlive its matrices."""
    x = model.encoder.embedding_hidden_mapping_in(model.embeddings(input_ids=ids))
    layer = model.encoder.albert_layer_groups[0].albert_layers[0]
    states = [x]
    for _ in range(model.config.num_hidden_layers):
        own = layer.attention
        x = own.LayerNorm(
            network.operation.attention_skip * x + own.dense(attended(own, x, model.config.num_attention_heads))
        )
        inner = layer.activation(x) if network.without_mlp else layer.ffn_output(layer.activation(layer.ffn(x)))
        x = layer.full_layer_layer_norm(x + inner)
        states.append(x)
    return states


def measured(loaded: LoadedModel, ids: Tensor, network: FigureNetwork) -> dict[int, Tensor]:
    """The relative residual by depth and sequence, as the reproduction takes it."""
    writer = RowWriter(coordinates=("curve",))
    prepared = prepare_inputs(loaded, {"input_ids": ids})
    with mlp_taken_out(loaded) if network.without_mlp else nullcontext():
        measure_network(
            loaded.model,
            prepared,
            network.operation,
            metrics=("relative_composite_residual",),
            writer=writer,
            at={"curve": network.name},
        )
    rows = writer.table().to_pylist()
    depths = sorted({row["layer"] + (row["site"] == "block.out") for row in rows})
    return {
        depth: torch.tensor(
            [row["value"] for row in rows if row["layer"] + (row["site"] == "block.out") == depth], dtype=torch.float64
        )
        for depth in depths
    }


@pytest.mark.parametrize("network", AUTHORS, ids=lambda network: network.name)
@pytest.mark.parametrize(("spec", "states"), [("init:tiny-bert", bert_states), ("init:tiny-albert", albert_states)])
def test_the_authors_networks_are_what_they_are_said_to_be(spec, states, network: FigureNetwork) -> None:
    loaded = load(spec, dtype="float64")
    ids = torch.arange(2 * 12).reshape(2, 12) % 29 + 5
    with torch.no_grad():
        expected = [relative_composite_residual(x) for x in states(loaded.model, ids, network)]
    seen = measured(loaded, ids, network)
    assert list(seen) == list(range(len(expected)))
    for depth, value in enumerate(expected):
        if float(value.min()) > 1e-9:
            torch.testing.assert_close(seen[depth], value, **CLOSE)
        else:
            assert float(seen[depth].max()) < 1e-8


def _fail_inside(loaded: LoadedModel, before: dict[str, int]) -> None:
    with mlp_taken_out(loaded):
        assert {name: id(module) for name, module in loaded.model.named_modules()} != before
        raise ZeroDivisionError


@pytest.mark.parametrize("network", AUTHORS, ids=lambda network: network.name)
def test_xlnet_agrees_with_its_own_switch_for_the_residual(network: FigureNetwork) -> None:
    """The model's own attention can leave its skip out when it is called so; its MLP module holds skip and norm."""
    ids = torch.arange(2 * 12).reshape(2, 12) + 5
    loaded, own = load("init:tiny-xlnet"), load("init:tiny-xlnet").model
    for layer in own.layer:
        if network.operation.attention_skip == 0.0:
            layer.rel_attn.post_attention = partial(layer.rel_attn.post_attention, residual=False)
        if network.without_mlp:
            layer.ff = nn.Identity()
    with torch.no_grad():
        states = own(input_ids=ids, output_hidden_states=True).hidden_states
    seen = measured(loaded, ids, network)
    for depth, x in enumerate(states):
        expected = relative_composite_residual(x)
        if float(expected.min()) > 1e-4:
            torch.testing.assert_close(seen[depth], expected, rtol=1e-6, atol=0.0)
        else:
            assert float(seen[depth].max()) < 1e-3


@pytest.mark.parametrize("spec", ["init:tiny-bert", "init:tiny-albert", "init:tiny-xlnet"])
def test_the_model_is_put_together_again_also_after_an_error(spec: str) -> None:
    loaded = load(spec)
    ids = torch.arange(2 * 8).reshape(2, 8) + 5
    before = {name: id(module) for name, module in loaded.model.named_modules()}
    with torch.no_grad():
        untouched = loaded.model(input_ids=ids).last_hidden_state
    with pytest.raises(ZeroDivisionError):
        _fail_inside(loaded, before)
    assert {name: id(module) for name, module in loaded.model.named_modules()} == before
    with torch.no_grad():
        assert torch.equal(loaded.model(input_ids=ids).last_hidden_state, untouched)


def test_at_initialisation_bert_agrees_with_the_named_variants() -> None:
    """There the MLP's norm, which the authors take out too, changes nothing."""
    loaded = load("init:tiny-bert", dtype="float64")
    ids = torch.arange(2 * 12).reshape(2, 12) + 5
    for network, name in zip(AUTHORS[:3], ("dong:san", "dong:san+mlp", "dong:san+skip"), strict=True):
        named = FigureNetwork(network.name, "authors", variant_named(name).operation)
        first, second = measured(loaded, ids, network), measured(loaded, ids, named)
        torch.testing.assert_close(first[1], second[1], rtol=1e-6, atol=0.0)


def test_other_families_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedOperationError, match="bert, albert, xlnet"), mlp_taken_out(load("init:tiny-gpt2")):
        pass


def test_the_theorem_reading_keeps_no_norm() -> None:
    san = next(network for network in NETWORKS if (network.name, network.reading) == ("SAN", "theorem"))
    assert san.operation.norm == "identity"
    assert not san.without_mlp
