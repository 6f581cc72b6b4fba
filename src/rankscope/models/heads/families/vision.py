"""Vision and contrastive text encoders: pre-norm blocks, no position term in attention unless noted."""

from __future__ import annotations

from dataclasses import replace

from rankscope.models.heads.family import Family, register

_LAYER_SCALE = ("the attention branch is multiplied per channel before it is added",)

VIT = Family(
    name="vit",
    model_types=("vit", "deit", "ijepa", "vit_msn"),
    layout="separate",
    projections=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    output="attention.o_proj",
    norms=("layernorm_before", "layernorm_after"),
    mlp=("mlp",),
)

register(
    VIT,
    replace(
        VIT,
        name="dinov2",
        model_types=("dinov2", "dinov2_with_registers"),
        norms=("norm1", "norm2"),
        notes=_LAYER_SCALE,
    ),
    replace(
        VIT,
        name="dinov3",
        model_types=("dinov3_vit",),
        position="rotary",
        norms=("norm1", "norm2"),
        notes=_LAYER_SCALE,
    ),
    replace(
        VIT,
        name="beit",
        model_types=("beit",),
        position="relative",
        notes=(*_LAYER_SCALE, "with relative positions switched on a learned bias is added to the scores"),
    ),
    replace(
        VIT,
        name="yolos",
        model_types=("yolos",),
        projections=("attention.attention.query", "attention.attention.key", "attention.attention.value"),
        output="attention.output.dense",
        mlp=("intermediate.dense", "output.dense"),
    ),
    replace(
        VIT,
        name="clip",
        model_types=("clip_vision_model", "clip_text_model", "siglip_vision_model", "siglip_text_model"),
        projections=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        output="self_attn.out_proj",
        norms=("layer_norm1", "layer_norm2"),
    ),
)
