"""T5 and related models: no scale, no biases, a learned bias for relative positions."""

from __future__ import annotations

from rankscope.models.heads.family import Family, register

register(
    Family(
        name="t5",
        model_types=("t5", "mt5", "umt5", "switch_transformers"),
        layout="separate",
        projections=("layer.0.SelfAttention.q", "layer.0.SelfAttention.k", "layer.0.SelfAttention.v"),
        output="layer.0.SelfAttention.o",
        heads=("num_heads",),
        scale="one",
        position="relative",
        norms=("layer.0.layer_norm",),
        notes=(
            "a learned bias of relative positions is added to the scores",
            "decoder blocks also attend to the encoder; these are the weights of self-attention",
        ),
    )
)
