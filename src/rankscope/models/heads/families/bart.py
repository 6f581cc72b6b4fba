"""BART, OPT and other fairseq models: four matrices with biases, positions outside attention."""

from __future__ import annotations

from dataclasses import replace

from rankscope.models.heads.family import Family, register

_BOTH_SIDES = ("encoder_attention_heads", "decoder_attention_heads")
_CROSS = ("decoder blocks also attend to the encoder; these are the weights of self-attention",)

BART = Family(
    name="bart",
    model_types=(
        "bart",
        "blenderbot",
        "blenderbot-small",
        "m2m_100",
        "marian",
        "mbart",
        "pegasus",
        "plbart",
        "whisper",
    ),
    layout="separate",
    projections=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.out_proj",
    heads=_BOTH_SIDES,
    norms=("self_attn_layer_norm", "final_layer_norm"),
    mlp=("fc1", "fc2"),
    notes=_CROSS,
)

register(
    BART,
    replace(BART, name="opt", model_types=("opt", "biogpt"), heads=("num_attention_heads",), notes=()),
    replace(BART, name="xglm", model_types=("xglm",), heads=("attention_heads",), notes=()),
    replace(
        BART,
        name="wav2vec2",
        model_types=("wav2vec2", "hubert", "unispeech", "data2vec-audio"),
        projections=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
        output="attention.out_proj",
        heads=("num_attention_heads",),
        norms=("layer_norm", "final_layer_norm"),
        mlp=("feed_forward",),
        notes=(),
    ),
)
