"""Llama and related models: four separate matrices, rotary positions, key-value heads shared by groups."""

from __future__ import annotations

from dataclasses import replace

from rankscope.models.heads.family import Family, register

_SOME_LAYERS = ("some layers do not rotate queries and keys",)
_POST = ("post_attention_layernorm", "post_feedforward_layernorm")
_SANDWICH = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")

LLAMA = Family(
    name="llama",
    model_types=(
        "arcee",
        "ernie4_5",
        "eurobert",
        "gemma",
        "glm",
        "helium",
        "llama",
        "ministral",
        "mistral",
        "mixtral",
        "nemotron",
        "qwen2",
        "qwen2_moe",
        "seed_oss",
        "starcoder2",
    ),
    layout="separate",
    projections=("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    output="self_attn.o_proj",
    position="rotary",
    norms=("input_layernorm", "post_attention_layernorm"),
    mlp=("mlp",),
)

register(
    LLAMA,
    replace(LLAMA, name="smollm3", model_types=("smollm3",), notes=_SOME_LAYERS),
    replace(LLAMA, name="olmo", model_types=("olmo",), requires={"clip_qkv": (None,)}),
    replace(LLAMA, name="olmo2", model_types=("olmo2", "olmo3", "flex_olmo"), qk_norm=True, norms=_POST),
    replace(LLAMA, name="olmoe", model_types=("olmoe",), qk_norm=True, requires={"clip_qkv": (None,)}),
    replace(LLAMA, name="qwen3", model_types=("qwen3", "qwen3_moe", "hunyuan_v1_dense"), qk_norm=True),
    replace(LLAMA, name="glm4-moe", model_types=("glm4_moe",), qk_norm="use_qk_norm"),
    replace(
        LLAMA,
        name="glm4",
        model_types=("glm4",),
        norms=("input_layernorm", "post_attention_layernorm", "post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    replace(LLAMA, name="exaone4", model_types=("exaone4",), qk_norm=True, norms=_POST, notes=_SOME_LAYERS),
    replace(
        LLAMA,
        name="apertus",
        model_types=("apertus",),
        qk_norm=True,
        norms=("attention_layernorm", "feedforward_layernorm"),
    ),
    replace(LLAMA, name="stablelm", model_types=("stablelm",), qk_norm="qk_layernorm"),
    replace(LLAMA, name="cohere", model_types=("cohere",), qk_norm="use_qk_norm", norms=("input_layernorm",)),
    replace(LLAMA, name="cohere2", model_types=("cohere2",), norms=("input_layernorm",), notes=_SOME_LAYERS),
    replace(LLAMA, name="granite", model_types=("granite",), scale="value", scale_key="attention_multiplier"),
    replace(
        LLAMA,
        name="granite-moe",
        model_types=("granitemoe",),
        scale="value",
        scale_key="attention_multiplier",
        mlp=("block_sparse_moe",),
    ),
    replace(
        LLAMA,
        name="gemma2",
        model_types=("gemma2",),
        scale="inverse root",
        scale_key="query_pre_attn_scalar",
        norms=_SANDWICH,
        notes=("scores pass through a soft cap (attn_logit_softcapping)",),
    ),
    replace(
        LLAMA,
        name="gemma3",
        model_types=("gemma3_text",),
        scale="inverse root",
        scale_key="query_pre_attn_scalar",
        qk_norm=True,
        norms=_SANDWICH,
    ),
    replace(
        LLAMA,
        name="gpt-oss",
        model_types=("gpt_oss",),
        notes=("a learned sink takes part of each row: attention rows add up to less than one",),
    ),
    replace(
        LLAMA,
        name="phi",
        model_types=("phi",),
        output="self_attn.dense",
        qk_norm="qk_layernorm",
        norms=("input_layernorm",),
    ),
    replace(LLAMA, name="phi3", model_types=("phi3",), layout="stacked", projections=("self_attn.qkv_proj",)),
    replace(
        LLAMA,
        name="modernbert",
        model_types=("modernbert",),
        layout="stacked",
        projections=("attn.Wqkv",),
        output="attn.Wo",
        norms=("mlp_norm",),
    ),
)
