"""XLNet: parameters with a head axis, and a second score from relative positions."""

from __future__ import annotations

from rankscope.models.heads.family import Family, register

register(
    Family(
        name="xlnet",
        model_types=("xlnet",),
        layout="einsum",
        projections=("rel_attn.q", "rel_attn.k", "rel_attn.v"),
        output="rel_attn.o",
        heads=("n_head",),
        position="relative",
        norms=("rel_attn.layer_norm", "ff.layer_norm"),
        mlp=("ff",),
        notes=("scores of relative positions and segments are added to query times key",),
    )
)
