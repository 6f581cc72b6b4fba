"""Accuracy by path length, in both meanings, against networks written out by hand."""

from __future__ import annotations

import pytest
import torch

from rankscope._errors import InputError
from rankscope.models.inputs import prepare_inputs
from rankscope.models.loading import load
from rankscope.paths.effectiveness import accuracy, path_effectiveness, run_along
from rankscope.paths.lengths import length_sums
from rankscope.stream.viewing import undisturbed, view_of
from tests.paths.conftest import Small


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


def test_a_recomputed_path_is_the_network_cut_down_to_it(small: Small, task) -> None:
    """Through head 1 of block 1, past the others, no MLP: attention sees the embedding itself."""
    _, view, data, _ = task
    model = small.model
    with torch.no_grad():
        found = run_along(view, data[0][0], (None, 1, None))
        x = model.wte(small.ids) + model.wpe(torch.arange(small.ids.shape[1]))
        block = model.h[1]
        query, key, value = block.attn.c_attn(block.ln_1(x)).split(8, dim=-1)
        part = slice(4, 8)
        scores = query[..., part] @ key[..., part].transpose(-1, -2) / 2.0
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        mixed = scores.softmax(-1) @ value[..., part]
        expected = model.ln_f(mixed @ block.attn.c_proj.weight[part] + block.attn.c_proj.bias)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def test_labels_below_zero_do_not_count() -> None:
    scores = torch.eye(3)
    assert accuracy([(scores, torch.tensor([0, 1, -100]))]) == 1.0
    assert accuracy([(scores, torch.tensor([1, 1, -100]))]) == 0.5


def test_all_recomputed_paths_cannot_be_run(task) -> None:
    config, view, data, classify = task
    with pytest.raises(InputError, match="paths="):
        path_effectiveness(view, config, data, classify, meaning="recomputed")
