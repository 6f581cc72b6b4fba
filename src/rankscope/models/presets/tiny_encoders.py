"""Tiny twins of text encoders: three blocks of width 32, four heads, one hundred tokens of vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankscope.models.presets.record import Preset

SHAPE: Mapping[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def _encoder(family: str, model_type: str, model_class: str = "AutoModel", **changes: Any) -> Preset:
    config = {**SHAPE, **changes}
    return Preset(f"tiny-{family}", model_type, config, model_class, "text", f"{family}, 3 blocks of width 32")


TINY_ENCODERS: tuple[Preset, ...] = (
    _encoder("bert", "bert"),
    _encoder("roberta", "roberta"),
    _encoder("camembert", "camembert"),
    _encoder("xlm-roberta", "xlm-roberta"),
    _encoder("xlm-roberta-xl", "xlm-roberta-xl"),
    _encoder("xmod", "xmod", languages=["en_XX"], default_language="en_XX"),
    _encoder("roberta-prelayernorm", "roberta-prelayernorm"),
    _encoder("data2vec-text", "data2vec-text"),
    _encoder("electra", "electra", embedding_size=32),
    _encoder("ernie", "ernie"),
    _encoder("megatron-bert", "megatron-bert"),
    _encoder("bert-generation", "bert-generation", bos_token_id=2, eos_token_id=1),
    _encoder("albert", "albert", embedding_size=16, bos_token_id=2, eos_token_id=3),
    _encoder("mobilebert", "mobilebert", embedding_size=16, intra_bottleneck_size=16, true_hidden_size=16),
    _encoder("convbert", "convbert", embedding_size=32),
    _encoder("squeezebert", "squeezebert", embedding_size=32, q_groups=2, k_groups=2, v_groups=2),
    _encoder("layoutlm", "layoutlm"),
    _encoder("mpnet", "mpnet"),
    _encoder("rembert", "rembert", input_embedding_size=16, output_embedding_size=16, bos_token_id=2, eos_token_id=3),
    _encoder("roformer", "roformer", embedding_size=32),
    _encoder("splinter", "splinter", question_token_id=4),
    _encoder("ibert", "ibert"),
    _encoder("mra", "mra"),
    _encoder("yoso", "yoso", use_expectation=True),
    _encoder("nystromformer", "nystromformer", num_landmarks=12, segment_means_seq_len=12),
    _encoder("fnet", "fnet", use_tpu_fourier_optimizations=False, bos_token_id=1, eos_token_id=2, pad_token_id=3),
    _encoder("longformer", "longformer", attention_window=4),
    _encoder("big-bird", "big_bird", attention_type="original_full", sep_token_id=3),
    _encoder("luke", "luke", entity_vocab_size=10, entity_emb_size=16),
    _encoder("esm", "esm", mask_token_id=4, pad_token_id=1, position_embedding_type="rotary"),
    _encoder("tapas", "tapas"),
    _encoder("deberta", "deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]),
    _encoder("deberta-v2", "deberta-v2", relative_attention=True, pos_att_type=["c2p", "p2c"], position_buckets=8),
    _encoder(
        "modernbert",
        "modernbert",
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
        cls_token_id=3,
        sep_token_id=4,
    ),
    _encoder(
        "eurobert", "eurobert", num_key_value_heads=2, pad_token_id=0, bos_token_id=2, eos_token_id=3, mask_token_id=4
    ),
    _encoder("nomic-bert", "nomic_bert"),
    _encoder("jina-v3", "jina_embeddings_v3"),
    Preset(
        "tiny-distilbert",
        "distilbert",
        {"vocab_size": 100, "dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64},
        summary="distilbert, 3 blocks of width 32",
    ),
    Preset(
        "tiny-flaubert",
        "flaubert",
        {"vocab_size": 100, "emb_dim": 32, "n_layers": 3, "n_heads": 4, "n_langs": 1},
        summary="flaubert, 3 blocks of width 32",
    ),
    Preset(
        "tiny-xlm",
        "xlm",
        {"vocab_size": 100, "emb_dim": 32, "n_layers": 3, "n_heads": 4, "n_langs": 1},
        summary="xlm, 3 blocks of width 32",
    ),
    Preset(
        "tiny-t5-encoder",
        "t5",
        {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4},
        "T5EncoderModel",
        summary="encoder half of t5, 3 blocks of width 32",
    ),
    Preset(
        "tiny-umt5-encoder",
        "umt5",
        {"vocab_size": 100, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4},
        "UMT5EncoderModel",
        summary="encoder half of umt5, 3 blocks of width 32",
    ),
    Preset(
        "tiny-clip-text",
        "clip_text_model",
        {**SHAPE, "max_position_embeddings": 77, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        "CLIPTextModel",
        summary="text tower of clip, 3 blocks of width 32",
    ),
    Preset(
        "tiny-siglip-text",
        "siglip_text_model",
        {
            **SHAPE,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "projection_size": 32,
        },
        "SiglipTextModel",
        summary="text tower of siglip, 3 blocks of width 32",
    ),
)
