"""Which families an expensive test takes in the ordinary suite; the others run with ``./dev slow``."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

RELATIVES = {
    "bert": "bert-generation data2vec-text electra ernie layoutlm luke rembert splinter tapas",
    "roberta": "camembert xlm-roberta",
    "xlm": "flaubert",
    "bart": "blenderbot-small marian plbart",
    "mbart": "blenderbot m2m-100 pegasus",
    "t5": "mt5",
    "umt5": "umt5-encoder",
    "vit": "deit ijepa vit-msn yolos",
    "dinov2": "dinov2-registers",
    "beit": "data2vec-vision",
    "clip-text": "siglip-text",
    "clip-vision": "siglip-vision",
    "wav2vec2": "data2vec-audio hubert unispeech",
    "llama": "arcee ernie4-5 helium ministral mistral seed-oss",
    "gemma": "vaultgemma",
    "olmo2": "olmo3",
    "cohere": "cohere2",
    "gptj": "codegen",
    "gpt-neox": "gpt-neox-japanese",
    "qwen2-moe": "flex-olmo glm4-moe qwen3-moe",
    "mamba": "falcon-mamba",
}
"""Families whose blocks have the structure of another's: they differ in embeddings, names, sizes or defaults."""


def without_relatives(names: Iterable[str]) -> list[object]:
    """Presets as parameters of a test, relatives of another one marked slow."""
    seconds = {f"tiny-{name}" for relatives in RELATIVES.values() for name in relatives.split()}
    return [pytest.param(name, marks=pytest.mark.slow) if name in seconds else name for name in names]
