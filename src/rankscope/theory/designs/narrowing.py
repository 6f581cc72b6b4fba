"""A narrower design that tokens cannot tell from the wide one, up to fluctuations of its width."""

from __future__ import annotations

import math

from rankscope.theory.designs.design import Design


def narrowed(design: Design, width: int) -> Design:
    r"""The design at another width, with every variance times its number of inputs kept.

    At large width tokens see a matrix only through that product: means are the same, fluctuations grow like
    :math:`1/\sqrt{width}`. **Heuristic** at small width. A design that is no wider stays as it is.

    Example:
        >>> wide = Design(depth=2, width=1024, heads=8)
        >>> thin = narrowed(wide, 64)
        >>> thin.width, thin.head_dim, round(thin.score_std / wide.score_std, 12)
        (64, 8, 1.0)
    """
    if design.width <= width:
        return design
    head_dim = max(1, round(design.head_dim * width / design.width))
    head_dim += head_dim % 2 if design.positions == "rope" else 0
    mlp_width = max(1, round(design.mlp_width * width / design.width))
    of_width = math.sqrt(design.width / width)
    of_heads = math.sqrt(design.head_dim / head_dim)
    of_mlp = math.sqrt(design.mlp_width / mlp_width)
    return design.changed(
        width=width,
        head_dim=head_dim,
        mlp_width=mlp_width,
        query_std=design.query_std * of_width,
        key_std=design.key_std * of_width,
        value_std=design.value_std * of_width,
        mlp_in_std=design.mlp_in_std * of_width,
        output_std=design.output_std * of_heads,
        mlp_out_std=design.mlp_out_std * of_mlp,
    )
