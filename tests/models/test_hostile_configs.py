"""Configurations of strangers: the same answer from a folder and from the hub, and nothing large is allocated."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from rankscope.errors import LoadError
from rankscope.models.loading import load
from rankscope.models.loading.affording import NetworkSize, refuse_unaffordable, size_of
from tests.models.mutated_configs import LONGEST, answer, base_folders, mutated, routes


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return base_folders(tmp_path_factory.mktemp("bases"), ("bert", "llama"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", "")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_twenty_mutated_configs_get_the_same_answer_on_both_routes(bases: dict[str, Path], tmp_path: Path) -> None:
    drawn, answers = random.Random(5), []
    for number in range(20):
        base = bases[sorted(bases)[number % 2]]
        text = mutated(json.loads((base / "config.json").read_text()), drawn)
        folder, hub, cache = routes(base, text, tmp_path / str(number))
        hidden = (Path(folder), next((cache / "models--owner--name" / "snapshots").iterdir()))
        began = time.process_time()
        both = [answer(spec, cache, hidden) for spec in (folder, hub)]
        assert time.process_time() - began < 2 * LONGEST, text[:500]
        assert both[0] == both[1], text[:500]
        assert not both[0].startswith("NOT OURS"), (both[0], text[:500])
        answers.append(both[0].startswith("refused"))
    assert 3 < sum(answers) < 20, "some are refused and some are models"


CASES: dict[str, tuple[dict[str, Any] | str, str]] = {
    "labels": ({"num_labels": 10**9}, "num_labels"),
    "layers": ({"num_hidden_layers": 10**9}, "layers"),
    "brackets": ("[" * 100_000, "cannot be read"),
    "weights of another size": ({"vocab_size": 10**7}, "do not belong together"),
    "kernel": ({"attn_implementation": "owner/kernel"}, "attention code from elsewhere"),
}


@pytest.mark.parametrize("route", ["folder", "hub"])
@pytest.mark.parametrize("case", CASES)
def test_a_config_from_the_hub_passes_the_gate_of_folders(
    bases: dict[str, Path], tmp_path: Path, case: str, route: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, said = CASES[case]
    whole = json.loads((bases["bert"] / "config.json").read_text())
    text = change if isinstance(change, str) else json.dumps({**whole, **change})
    folder, hub, cache = routes(bases["bert"], text, tmp_path / "routes")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    with pytest.raises(LoadError, match=said):
        load(folder if route == "folder" else hub)


def test_buffers_count() -> None:
    from transformers import GPTNeoConfig, GPTNeoModel

    positions, layers = 2000, 2
    config = GPTNeoConfig(
        hidden_size=16,
        num_heads=2,
        num_layers=layers,
        attention_types=[[["global"], layers]],
        max_position_embeddings=positions,
        vocab_size=50,
    )
    size = size_of(config, GPTNeoModel)
    # Each layer has a square of booleans over all pairs of positions, and one number for masked ones.
    assert layers * positions**2 <= size.buffers < layers * positions**2 + 100
    refuse_unaffordable(config, GPTNeoModel, torch.float32, memory=2**24)
    with pytest.raises(LoadError, match="GiB"):
        refuse_unaffordable(config, GPTNeoModel, torch.float32, memory=2**22)


def test_a_build_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import BertConfig

    def endless(config: object) -> torch.nn.Module:
        whole = torch.nn.Module()
        while True:
            whole.add_module("x", torch.nn.Linear(1, 1))

    monkeypatch.setattr("rankscope.models.loading.affording.MOST_MODULES", 1000)
    with pytest.raises(LoadError, match="too many modules"):
        size_of(BertConfig(), endless)
    assert size_of(BertConfig(), lambda config: torch.nn.Linear(2, 3)) == NetworkSize(9, 0), "and the hooks are gone"
