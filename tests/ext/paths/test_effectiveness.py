"""Accuracy by path length, in both meanings, against networks written out by hand."""

from __future__ import annotations

import pytest
import torch

from rankscope.errors import InputError, UnsupportedConfigError
from rankscope.ext.paths.effectiveness import _only_stack, accuracy, path_effectiveness, run_along
from rankscope.ext.paths.lengths import length_sums
from rankscope.models.inputs import Batch, prepare_inputs
from rankscope.models.loading import load
from rankscope.stream.discovery import discover
from rankscope.stream.viewing import undisturbed, view_of
from tests.ext.paths.conftest import Small, small_gpt2
from tests.own_models import GPT, ids


@pytest.fixture(scope="module")
def task(small: Small):
    loaded = load(small.model)
    batch = prepare_inputs(loaded, small.ids)[0]
    with undisturbed(small.model):
        view = view_of(small.model, batch)
    head = torch.randn(8, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    labels = (small.network.out @ head).argmax(-1)
    return loaded.config, view, [(batch, labels)], lambda stream: stream @ head


def test_the_whole_network_and_each_length(small: Small, task) -> None:
    config, view, data, classify = task
    found = path_effectiveness(view, config, data, classify)
    assert found[0].accuracy == (1.0,)
    sums = length_sums(small.network).by_length
    for entry in found[1:]:
        expected = accuracy([(classify(sums[entry.length]), data[0][1])])
        assert entry.accuracy == (expected,)
    assert [entry.length for entry in found[1:]] == [0, 1, 2, 3]


@pytest.mark.parametrize("meaning", ["frozen", "recomputed"])
def test_random_paths(task, meaning) -> None:
    config, view, data, classify = task
    found = path_effectiveness(view, config, data, classify, lengths=[0, 2], paths=3, meaning=meaning, repeats=2)
    assert [(entry.length, entry.meaning, len(entry.accuracy)) for entry in found[1:]] == [
        (0, meaning, 2),
        (2, meaning, 2),
    ]
    assert len(set(found[1].accuracy)) == 1, "there is one path of length 0"


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("mlp", ["drop", "keep"])
def test_a_recomputed_path_is_the_network_cut_down_to_it(small: Small, implementation: str, mlp) -> None:
    """Through head 1 of block 1, past the others: attention sees what the path itself carries."""
    model = small_gpt2()
    model.set_attn_implementation(implementation)
    batch = prepare_inputs(load(model), small.ids)[0]
    with undisturbed(model), torch.no_grad():
        found = run_along(view_of(model, batch), batch, (None, 1, None), mlp=mlp)

        def past(x: torch.Tensor, layer: int) -> torch.Tensor:
            return x + model.h[layer].mlp(model.h[layer].ln_2(x)) if mlp == "keep" else x

        x = past(model.wte(small.ids) + model.wpe(torch.arange(small.ids.shape[1])), 0)
        block = model.h[1]
        query, key, value = block.attn.c_attn(block.ln_1(x)).split(8, dim=-1)
        part = slice(4, 8)
        scores = query[..., part] @ key[..., part].transpose(-1, -2) / 2.0
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        mixed = scores.softmax(-1) @ value[..., part]
        x = past(mixed @ block.attn.c_proj.weight[part] + block.attn.c_proj.bias, 1)
        expected = model.ln_f(past(x, 2))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_what_has_no_recomputed_paths_is_refused(small: Small, task) -> None:
    _, view, data, _ = task
    with pytest.raises(InputError, match="A path of 2 entries for 3 blocks in 1 stacks"):
        run_along(view, data[0][0], (None, 1))
    torch.manual_seed(0)
    parallel = GPT("parallel").eval()
    batch = Batch({}, None, 0, 2, (ids(),))
    view = discover(parallel, lambda: parallel(ids()), batch=2)
    with pytest.raises(UnsupportedConfigError, match="attention and MLP are added at once"):
        run_along(view, batch, (None, 1, None))
    networks = {"encoder": small.network, "decoder": small.network}
    with pytest.raises(InputError, match="stacks encoder, decoder; effectiveness needs one"):
        _only_stack(networks)


def test_labels_below_zero_do_not_count() -> None:
    scores = torch.eye(3)
    assert accuracy([(scores, torch.tensor([0, 1, -100]))]) == 1.0
    assert accuracy([(scores, torch.tensor([1, 1, -100]))]) == 0.5


def test_all_recomputed_paths_cannot_be_run(task) -> None:
    config, view, data, classify = task
    with pytest.raises(InputError, match="paths="):
        path_effectiveness(view, config, data, classify, meaning="recomputed")
