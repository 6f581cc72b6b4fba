"""Small models trained with and without skips, MLPs and norms: does training slow collapse?"""

from __future__ import annotations

from rankscope._citations import Cite
from rankscope.papers._spec import declare

declare(
    __name__,
    name="training-fights-collapse",
    title="Does training fight collapse?",
    cites=(Cite("dong2021attention", "sec. 4.1"), Cite("noci2022signal")),
    paper=(
        "Dong, Cordonnier and Loukas (2021, section 4.1) find doubly exponential collapse in networks whose skips and "
        "MLPs were removed after training, or that were never trained, and expect slower collapse in networks trained "
        "in that form. Noci et al. (2022) show that the gradients of queries and keys vanish at collapse, so that "
        "training could not undo it."
    ),
    figure=(
        "Relative residual after the last block, gradient of queries and keys over that of values, and loss, over "
        "training steps, for an encoder and a causal model with and without skips, MLPs and norms"
    ),
    minutes=10,
)
