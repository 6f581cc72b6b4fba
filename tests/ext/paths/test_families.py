"""The sum over all lengths is the forward pass: every family with head weights, whole and cut."""

from __future__ import annotations

import pytest
import torch

from rankscope.errors import UnsupportedOperationError
from rankscope.ext.paths.capture import freeze_network
from rankscope.ext.paths.lengths import LengthSums
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import LoadedModel, load
from rankscope.models.loading.quiet import quiet_transformers
from rankscope.stream.viewing import undisturbed, view_of
from rankscope.surgery.operating import operating
from rankscope.surgery.operation import Operation
from tests.contracts.compatibility import committed
from tests.families import without_relatives

FAMILIES = sorted(name for name, facts in committed().items() if facts["checks"].get("heads") == "pass")
CUTS = {
    "whole": Operation(),
    "half skips": Operation(attention_skip=0.5, mlp_skip=0.5),
    "no skips": Operation(attention_skip=0.0, mlp_skip=0.0),
    "attention alone": Operation(attention_skip=0.0, mlp_skip=0.0, mlp="drop", norm="identity"),
    "one layer cut": Operation(attention_skip=0.0, mlp_skip=0.0, layers=frozenset({1})),
}
ONLY_FLOAT32 = {"tiny-xlnet"}


def perturbed(name: str, dtype: str | None) -> LoadedModel:
    """Biases and gains start at 0 and 1, which would hide a misplaced one."""
    loaded = load(f"init:{name}", dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return loaded


def errors(loaded: LoadedModel, cuts: list[str]) -> dict[str, float]:
    """Worst relative error at any block or at the end, by cut; cuts the model cannot undergo are left out."""
    texts = loaded.input_kind in ("text", "text-to-text")
    batch = prepare_inputs(loaded, sequences=2, tokens=9, random_tokens=texts)[0]
    found = {}
    with undisturbed(loaded.model), quiet_transformers():
        view = view_of(loaded.model, batch)
        for name in cuts:
            try:
                with operating(loaded.model, CUTS[name], view=view):
                    networks = freeze_network(view, loaded.config, batch)
                    assert len(networks) == len(view.stacks)
                    found[name] = max(worst(network) for network in networks.values())
            except UnsupportedOperationError:
                continue
    return found


def worst(network) -> float:
    sums, error = LengthSums(len(network.attention)), 0.0
    sums.begin(network.entry)
    for block in network.blocks:
        sums.through(block)
        error = max(error, sums.error(block.out))
    assert sums.reached == len(network.attention) > 0
    return error


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", without_relatives(FAMILIES))
def test_float64(name: str) -> None:
    single = name in ONLY_FLOAT32
    found = errors(perturbed(name, None if single else "float64"), list(CUTS))
    assert {"whole", "attention alone"} <= set(found)
    assert max(found.values()) < (1e-4 if single else 1e-10), found


@pytest.mark.parametrize("name", ["tiny-bert", "tiny-llama", "tiny-gpt2", "tiny-gemma2", "tiny-t5"])
def test_float32(name: str) -> None:
    found = errors(perturbed(name, "float32"), list(CUTS))
    assert max(found.values()) < 1e-4


def test_almost_every_family_can_be_decomposed() -> None:
    assert len(FAMILIES) >= 100
