r"""Whether a residual attention layer smooths or sharpens, from the eigenvalues of the values and of attention.

With fixed attention A and value matrix H the layer is :math:`I + H\otimes A` and depth L takes its power: the
eigenvalue :math:`1 + \lambda_H\lambda_A` of largest modulus wins. For H in [-1, 0) that is an eigenvalue of A away from
1: tokens are sharpened. For positive H it is :math:`\lambda_A = 1`, the all-ones vector: they are smoothed.
"""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope.ext.theory.oracles._spec import BARE_BRANCHES, COMPLETE, ORACLES, POSITION_FREE, Oracle
from rankscope.models.design import Design


def _values(design: Design, tokens: int) -> dict[str, float]:
    """Radius of the disc of eigenvalues of W_V W_O, and the factors per block at its two extremes."""
    radius = design.value_gain**0.5
    return {"value_spectral_radius": radius, "smoothing_factor": 1 + radius, "sharpening_factor": 1.0}


ORACLES.add(
    "dovonon_2024_value_spectrum",
    Oracle(
        name="dovonon_2024_value_spectrum",
        summary="Whether residual attention smooths or sharpens, from the eigenvalues of the values",
        assumptions=(COMPLETE, POSITION_FREE, BARE_BRANCHES),
        cites=(Cite("dovonon2024"),),
        values=_values,
    ),
)
