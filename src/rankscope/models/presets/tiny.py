"""Small networks for examples: three blocks of width 32, and a deep one whose tokens collapse."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankscope.models.presets.record import InputKind, Preset

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


TINY: tuple[Preset, ...] = (
    _tiny("bert", _SHAPE),
    _tiny("roberta", _SHAPE),
    _tiny("albert", {**_SHAPE, "embedding_size": 16, "bos_token_id": 2, "eos_token_id": 3}),
    _tiny(
        "modernbert", {**_SHAPE, **_SPECIAL, "eos_token_id": 1, "bos_token_id": 2, "cls_token_id": 3, "sep_token_id": 4}
    ),
    _tiny("gpt2", {**_STACKED, "n_embd": 32, "n_positions": 128}),
    _tiny("xlnet", {**_STACKED, "d_model": 32, "d_inner": 64, "pad_token_id": 5}),
    _tiny("llama", {**_GROUPED, "max_position_embeddings": 32768}),
    _tiny("qwen3", _GROUPED),
    _tiny("gemma2", _GROUPED),
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
DEEP: tuple[Preset, ...] = (
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
)
"""Small networks in which tokens collapse although nothing was removed."""
