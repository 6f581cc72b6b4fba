"""BERT and related models: query, key, value and output as four matrices of one attention module."""

from __future__ import annotations

from dataclasses import replace

from rankscope.models.heads.family import Family, register

BERT = Family(
    name="bert",
    model_types=(
        "bert",
        "bert-generation",
        "camembert",
        "data2vec-text",
        "electra",
        "ernie",
        "layoutlm",
        "rembert",
        "roberta",
        "splinter",
        "tapas",
        "xlm-roberta",
    ),
    layout="separate",
    projections=("attention.self.query", "attention.self.key", "attention.self.value"),
    output="attention.output.dense",
    norms=("attention.output.LayerNorm", "output.LayerNorm"),
    mlp=("intermediate.dense", "output.dense"),
    requires={"position_embedding_type": ("absolute",), "pruned_heads": ({}, None)},
)

register(
    BERT,
    replace(BERT, name="xmod", model_types=("xmod",), norms=("output.LayerNorm",), notes=("adapters follow the MLP",)),
    replace(
        BERT,
        name="bert-pre-norm",
        model_types=("roberta-prelayernorm",),
        norms=("attention.LayerNorm", "intermediate.LayerNorm"),
    ),
    replace(BERT, name="megatron-bert", model_types=("megatron-bert",), norms=("attention.ln", "ln")),
    replace(
        BERT,
        name="xlm-roberta-xl",
        model_types=("xlm-roberta-xl",),
        norms=("attention.self_attn_layer_norm", "LayerNorm"),
    ),
    replace(
        BERT,
        name="esm",
        model_types=("esm",),
        position="rotary",
        norms=("attention.LayerNorm", "LayerNorm"),
        requires={"position_embedding_type": ("rotary",)},
    ),
    replace(BERT, name="roformer", model_types=("roformer",), position="rotary", requires={"rotary_value": (False,)}),
    replace(
        BERT,
        name="mpnet",
        model_types=("mpnet",),
        projections=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
        output="attention.attn.o",
        position="relative",
        norms=("attention.LayerNorm", "output.LayerNorm"),
        requires={},
        notes=("a learned bias of relative positions is added to the scores",),
    ),
    Family(
        name="albert",
        model_types=("albert",),
        layout="separate",
        projections=("attention.query", "attention.key", "attention.value"),
        output="attention.dense",
        norms=("attention.LayerNorm", "full_layer_layer_norm"),
        mlp=("ffn", "ffn_output"),
        requires={"position_embedding_type": ("absolute",), "inner_group_num": (1,)},
        notes=("one block is called in every layer",),
    ),
    Family(
        name="distilbert",
        model_types=("distilbert",),
        layout="separate",
        projections=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        output="attention.out_lin",
        heads=("n_heads",),
        norms=("sa_layer_norm", "output_layer_norm"),
        mlp=("ffn",),
    ),
)
