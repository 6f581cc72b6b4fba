"""Causal models with positions as a linear bias on the scores, and Falcon, which supports both kinds."""

from __future__ import annotations

from rankscope.models.heads.family import Family, register

_BIAS = ("a bias linear in the distance is added to the scores",)

register(
    Family(
        name="bloom",
        model_types=("bloom",),
        layout="grouped",
        projections=("self_attention.query_key_value",),
        output="self_attention.dense",
        heads=("n_head",),
        position="alibi",
        norms=("input_layernorm", "post_attention_layernorm"),
        mlp=("mlp",),
        notes=_BIAS,
    ),
    Family(
        name="mpt",
        model_types=("mpt",),
        layout="stacked",
        projections=("attn.Wqkv",),
        output="attn.out_proj",
        heads=("n_heads",),
        position="alibi",
        norms=("norm_1", "norm_2"),
        mlp=("ffn",),
        requires={
            "attn_config.clip_qkv": (None,),
            "attn_config.softmax_scale": (None,),
            "attn_config.qk_ln": (False, None),
            "attn_config.attn_type": ("multihead_attention",),
        },
        notes=_BIAS,
    ),
    Family(
        name="falcon",
        model_types=("falcon",),
        layout="grouped",
        projections=("self_attention.query_key_value",),
        output="self_attention.dense",
        position="rotary",
        mlp=("mlp",),
        notes=("with alibi=True a bias linear in the distance is added to the scores instead of rotation",),
    ),
)
