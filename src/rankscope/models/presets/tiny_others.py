"""Tiny twins of vision, audio and encoder-decoder models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankscope.models.presets.record import Preset

VISION: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
}
AUDIO: Mapping[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
BART: Mapping[str, Any] = {
    "vocab_size": 100,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
T5: Mapping[str, Any] = {
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
}


def _vision(family: str, model_type: str, model_class: str = "AutoModel", **changes: Any) -> Preset:
    return Preset(
        f"tiny-{family}", model_type, {**VISION, **changes}, model_class, "image", f"{family}, 3 blocks of width 32"
    )


def _staged(family: str, model_type: str, **changes: Any) -> Preset:
    config = {"image_size": 32, **changes}
    return Preset(f"tiny-{family}", model_type, config, "AutoModel", "image", f"{family}, two stages")


def _audio(family: str, model_type: str, **changes: Any) -> Preset:
    return Preset(
        f"tiny-{family}", model_type, {**AUDIO, **changes}, "AutoModel", "audio", f"{family}, 3 blocks of width 32"
    )


def _seq2seq(family: str, model_type: str, base: Mapping[str, Any], **changes: Any) -> Preset:
    summary = f"{family}, 2 encoder and 2 decoder blocks of width 32"
    return Preset(f"tiny-{family}", model_type, {**base, **changes}, "AutoModel", "text-to-text", summary)


TINY_VISION: tuple[Preset, ...] = (
    _vision("vit", "vit"),
    _vision("deit", "deit"),
    _vision("dinov2", "dinov2"),
    _vision("dinov2-registers", "dinov2_with_registers"),
    _vision("dinov3", "dinov3_vit"),
    _vision("beit", "beit"),
    _vision("data2vec-vision", "data2vec-vision"),
    _vision("clip-vision", "clip_vision_model", "CLIPVisionModel"),
    _vision("siglip-vision", "siglip_vision_model", "SiglipVisionModel"),
    _vision("vit-msn", "vit_msn"),
    _vision("ijepa", "ijepa"),
    _vision("yolos", "yolos", image_size=[32, 32], num_detection_tokens=4),
    _staged("swin", "swin", patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    _staged("swinv2", "swinv2", patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
    _staged(
        "pvt",
        "pvt",
        num_encoder_blocks=2,
        depths=[2, 2],
        sequence_reduction_ratios=[2, 1],
        hidden_sizes=[16, 32],
        patch_sizes=[4, 2],
        strides=[4, 2],
        num_attention_heads=[2, 4],
        mlp_ratios=[2, 2],
    ),
)
TINY_AUDIO: tuple[Preset, ...] = (
    _audio("wav2vec2", "wav2vec2"),
    _audio("hubert", "hubert"),
    _audio("wavlm", "wavlm"),
    _audio("data2vec-audio", "data2vec-audio", conv_pos_kernel_size=4),
    _audio("unispeech", "unispeech"),
)
TINY_SEQ2SEQ: tuple[Preset, ...] = (
    _seq2seq("t5", "t5", T5),
    _seq2seq("mt5", "mt5", T5),
    _seq2seq("umt5", "umt5", T5),
    _seq2seq("longt5", "longt5", T5, local_radius=4),
    _seq2seq(
        "switch", "switch_transformers", T5, num_experts=2, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1
    ),
    _seq2seq("bart", "bart", BART),
    _seq2seq("mbart", "mbart", BART),
    _seq2seq("marian", "marian", BART),
    _seq2seq("pegasus", "pegasus", BART),
    _seq2seq("pegasus-x", "pegasus_x", BART, block_size=4, num_global_tokens=4),
    _seq2seq("blenderbot", "blenderbot", BART),
    _seq2seq("blenderbot-small", "blenderbot-small", BART),
    _seq2seq("m2m-100", "m2m_100", BART),
    _seq2seq("plbart", "plbart", BART),
    _seq2seq("bigbird-pegasus", "bigbird_pegasus", BART, attention_type="original_full"),
    _seq2seq(
        "led", "led", BART, attention_window=4, max_encoder_position_embeddings=128, max_decoder_position_embeddings=128
    ),
    _seq2seq(
        "prophetnet",
        "prophetnet",
        {
            "vocab_size": 100,
            "hidden_size": 32,
            "num_encoder_layers": 2,
            "num_decoder_layers": 2,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "max_position_embeddings": 256,
        },
    ),
    Preset(
        "tiny-whisper",
        "whisper",
        {**BART, "num_mel_bins": 16, "max_source_positions": 24, "max_target_positions": 32},
        "AutoModel",
        "audio",
        "whisper, 2 encoder and 2 decoder blocks of width 32",
    ),
)
