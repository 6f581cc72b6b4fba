"""Architectures that ``init:NAME`` can build at random: two published shapes, a few tiny twins, a deep one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from rankscope.errors import UnknownNameError

__all__ = ["PRESETS", "InputKind", "Preset", "preset"]

InputKind = Literal["text", "image", "audio", "text-to-text", "tensors"]


@dataclass(frozen=True)
class Preset:
    """A named architecture that can be initialised at random, without weights and without a network.

    Attributes:
        name: what follows ``init:`` in a model spec.
        model_type: the ``model_type`` of the transformers configuration.
        config: keys that differ from the defaults of that configuration.
        model_class: ``"AutoModel"`` or the transformers class to build.
        input_kind: what the model reads.
        summary: one line for listings.
    """

    name: str
    model_type: str
    config: Mapping[str, Any]
    model_class: str = "AutoModel"
    input_kind: InputKind = "text"
    summary: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", MappingProxyType(dict(self.config)))


_SHAPE: Mapping[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
_SPECIAL: Mapping[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED: Mapping[str, Any] = {**_SHAPE, **_SPECIAL, "num_key_value_heads": 2, "head_dim": 8}
_STACKED: Mapping[str, Any] = {"vocab_size": 100, "n_layer": 3, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2}


def _tiny(family: str, config: Mapping[str, Any], kind: InputKind = "text", blocks: str = "3 blocks") -> Preset:
    return Preset(f"tiny-{family}", family, config, "AutoModel", kind, f"{family}, {blocks} of width 32")


_PRESETS = (
    Preset(
        "bert-base",
        "bert",
        {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072},
        summary="BERT base, uncased: 12 blocks of width 768",
    ),
    Preset("gpt2", "gpt2", {}, summary="GPT-2 small: 12 blocks of width 768"),
    Preset(
        "deep-bert",
        "bert",
        {
            "vocab_size": 1000,
            "hidden_size": 64,
            "num_hidden_layers": 24,
            "num_attention_heads": 4,
            "intermediate_size": 256,
            "initializer_range": 0.125,
        },
        summary="bert, 24 blocks of width 64, weights of variance 1/64: collapses at initialisation",
    ),
    _tiny("bert", _SHAPE),
    _tiny("gpt2", {**_STACKED, "n_embd": 32, "n_positions": 128}),
    _tiny("llama", {**_GROUPED, "max_position_embeddings": 32768}),
    _tiny("mixtral", {**_GROUPED, "num_local_experts": 4}),
    _tiny(
        "mamba2",
        {
            **_SPECIAL,
            "vocab_size": 100,
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "state_size": 8,
            "num_heads": 8,
            "head_dim": 8,
            "n_groups": 2,
            "chunk_size": 8,
        },
    ),
    _tiny(
        "t5",
        {
            "vocab_size": 100,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_heads": 4,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 0,
        },
        "text-to-text",
        "2 encoder and 2 decoder blocks",
    ),
    _tiny(
        "vit",
        {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "intermediate_size": 64,
            "image_size": 32,
            "patch_size": 8,
        },
        "image",
    ),
)
PRESETS: dict[str, Preset] = {entry.name: entry for entry in _PRESETS}


def preset(name: str) -> Preset:
    """The preset of that name.

    Raises:
        UnknownNameError: no such preset; the message names the nearest ones.

    Example:
        >>> preset("bert-base").model_type
        'bert'
    """
    try:
        return PRESETS[name]
    except KeyError:
        raise UnknownNameError("preset", name, PRESETS) from None
