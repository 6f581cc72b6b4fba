"""Tiny twins of the families that have no preset: ``init:tiny-NAME`` builds them once this module is imported.

Three blocks of width 32, four heads, one hundred tokens of vocabulary. ``conftest.py`` imports it; programs that tests
start import it themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankscope.models.presets import PRESETS, Preset

ENCODER_SHAPE: Mapping[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def _encoder(family: str, model_type: str, model_class: str = "AutoModel", **changes: Any) -> Preset:
    config = {**ENCODER_SHAPE, **changes}
    return Preset(f"tiny-{family}", model_type, config, model_class, "text", f"{family}, 3 blocks of width 32")


TINY_ENCODERS: tuple[Preset, ...] = (
    _encoder("roberta", "roberta"),
    _encoder("albert", "albert", embedding_size=16, bos_token_id=2, eos_token_id=3),
    _encoder(
        "modernbert", "modernbert", pad_token_id=0, bos_token_id=2, eos_token_id=1, cls_token_id=3, sep_token_id=4
    ),
    Preset(
        "tiny-xlnet",
        "xlnet",
        {
            "vocab_size": 100,
            "n_layer": 3,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "d_model": 32,
            "d_inner": 64,
            "pad_token_id": 5,
        },
        summary="xlnet, 3 blocks of width 32",
    ),
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
        {**ENCODER_SHAPE, "max_position_embeddings": 77, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
        "CLIPTextModel",
        summary="text tower of clip, 3 blocks of width 32",
    ),
    Preset(
        "tiny-siglip-text",
        "siglip_text_model",
        {
            **ENCODER_SHAPE,
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


SHAPE: Mapping[str, Any] = {
    **ENCODER_SHAPE,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED: Mapping[str, Any] = {**SHAPE, "num_key_value_heads": 2, "head_dim": 8}
MIXTURE: Mapping[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}


def _decoder(family: str, model_type: str | None = None, base: Mapping[str, Any] = GROUPED, **changes: Any) -> Preset:
    config = {**base, **changes}
    name = model_type if model_type is not None else family
    return Preset(f"tiny-{family}", name, config, "AutoModel", "text", f"{family}, {_size(config)}")


def _size(config: Mapping[str, Any]) -> str:
    depth = next(config[key] for key in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if key in config)
    width = next(config[key] for key in ("hidden_size", "n_embd", "d_model") if key in config)
    return f"{depth} blocks of width {width}"


TINY_DECODERS: tuple[Preset, ...] = (
    _decoder("openai-gpt", base={}, vocab_size=100, n_embd=32, n_layer=3, n_head=4, n_positions=128),
    _decoder(
        "gpt-bigcode",
        "gpt_bigcode",
        base={},
        vocab_size=100,
        n_embd=32,
        n_layer=3,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        n_positions=128,
    ),
    _decoder(
        "gpt-neo",
        "gpt_neo",
        base={},
        vocab_size=100,
        hidden_size=32,
        num_layers=3,
        num_heads=4,
        attention_types=[[["global", "local", "global"], 1]],
        window_size=8,
        bos_token_id=1,
        eos_token_id=2,
        max_position_embeddings=128,
    ),
    _decoder(
        "gptj",
        base={},
        vocab_size=100,
        n_embd=32,
        n_layer=3,
        n_head=4,
        rotary_dim=4,
        bos_token_id=1,
        eos_token_id=2,
        n_positions=128,
    ),
    _decoder(
        "codegen",
        base={},
        vocab_size=100,
        n_embd=32,
        n_layer=3,
        n_head=4,
        rotary_dim=4,
        bos_token_id=1,
        eos_token_id=2,
        n_positions=128,
    ),
    _decoder("ctrl", base={}, vocab_size=100, n_embd=32, n_layer=3, n_head=4, dff=64, n_positions=128),
    _decoder("gpt-neox", "gpt_neox", base=SHAPE),
    _decoder("gpt-neox-japanese", "gpt_neox_japanese", base=SHAPE),
    _decoder("opt", base=SHAPE, ffn_dim=64, word_embed_proj_dim=32),
    _decoder(
        "bloom",
        base={},
        vocab_size=100,
        hidden_size=32,
        n_layer=3,
        n_head=4,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    _decoder("mpt", base={}, vocab_size=100, d_model=32, n_layers=3, n_heads=4),
    _decoder("falcon", base=SHAPE),
    _decoder("biogpt", base=SHAPE),
    _decoder(
        "xglm",
        base={},
        vocab_size=100,
        d_model=32,
        num_layers=3,
        attention_heads=4,
        ffn_dim=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    _decoder("mistral"),
    _decoder("qwen3"),
    _decoder("gemma2"),
    _decoder("ministral"),
    _decoder("qwen2"),
    _decoder("gemma"),
    _decoder("gemma3", "gemma3_text"),
    _decoder("phi"),
    _decoder("phi3"),
    _decoder("phimoe", num_local_experts=4),
    _decoder("olmo"),
    _decoder("olmo2"),
    _decoder("olmo3"),
    _decoder("olmoe", num_experts=4, num_experts_per_tok=2),
    _decoder("cohere"),
    _decoder("cohere2"),
    _decoder("granite"),
    _decoder("granitemoe", num_local_experts=4),
    _decoder("stablelm"),
    _decoder("starcoder2"),
    _decoder("glm"),
    _decoder("glm4"),
    _decoder("smollm3"),
    _decoder("helium"),
    _decoder("arcee"),
    _decoder("apertus"),
    _decoder("seed-oss", "seed_oss"),
    _decoder("ernie4-5", "ernie4_5"),
    _decoder("hunyuan-dense", "hunyuan_v1_dense"),
    _decoder("nemotron"),
    _decoder("exaone4"),
    _decoder("persimmon"),
    _decoder("diffllama"),
    _decoder("bitnet"),
    _decoder("vaultgemma"),
    _decoder("lfm2"),
    _decoder("doge"),
    _decoder("qwen2-moe", "qwen2_moe", **MIXTURE, shared_expert_intermediate_size=16),
    _decoder("qwen3-moe", "qwen3_moe", **MIXTURE),
    _decoder(
        "qwen3-next",
        "qwen3_next",
        **MIXTURE,
        shared_expert_intermediate_size=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_hidden_layers=4,
    ),
    _decoder("flex-olmo", "flex_olmo", num_experts=4, num_experts_per_tok=2),
    _decoder("gpt-oss", "gpt_oss", num_local_experts=4, num_experts_per_tok=2),
    _decoder("minimax", num_local_experts=2, block_size=8),
    _decoder("jetmoe", kv_channels=8, num_local_experts=4),
    _decoder("llama4", "llama4_text", num_local_experts=4, intermediate_size_mlp=64),
    _decoder("deepseek-v2", "deepseek_v2", base=SHAPE, **LATENT),
    _decoder("deepseek-v3", "deepseek_v3", base=SHAPE, **LATENT),
    _decoder("minicpm3", "minicpm3", base=SHAPE, **LATENT),
    _decoder("glm4-moe", "glm4_moe", **MIXTURE, n_routed_experts=4, n_group=1, topk_group=1),
    _decoder(
        "jamba",
        base=SHAPE,
        num_key_value_heads=2,
        num_experts=2,
        num_hidden_layers=4,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        mamba_d_state=8,
    ),
    _decoder(
        "bamba",
        base=SHAPE,
        num_key_value_heads=2,
        attn_layer_indices=[1],
        mamba_n_heads=4,
        mamba_d_head=16,
        mamba_d_state=8,
        mamba_chunk_size=8,
    ),
    _decoder("recurrent-gemma", "recurrent_gemma", base=SHAPE, lru_width=32, attention_window_size=16, head_dim=8),
    _decoder(
        "mamba",
        base={},
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=3,
        state_size=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    _decoder(
        "falcon-mamba",
        "falcon_mamba",
        base={},
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=3,
        state_size=8,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    _decoder(
        "xlstm",
        base={},
        vocab_size=100,
        hidden_size=32,
        embedding_dim=32,
        num_hidden_layers=3,
        num_heads=4,
        chunk_size=8,
        autocast_kernel_dtype="float32",
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    _decoder(
        "rwkv",
        base={},
        vocab_size=100,
        hidden_size=32,
        num_hidden_layers=3,
        attention_hidden_size=32,
        intermediate_size=64,
        bos_token_id=1,
        eos_token_id=2,
    ),
)


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


for _preset in (*TINY_ENCODERS, *TINY_DECODERS, *TINY_SEQ2SEQ, *TINY_VISION, *TINY_AUDIO):
    assert _preset.name not in PRESETS, f"the preset {_preset.name!r} is written twice"
    PRESETS[_preset.name] = _preset
TINY_PRESETS: tuple[str, ...] = tuple(name for name in PRESETS if name.startswith("tiny-"))
