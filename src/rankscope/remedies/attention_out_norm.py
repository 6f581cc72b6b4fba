"""A norm on the output of attention."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.remedies._present import OUTPUT_NORM, refuse_norm_in_attention
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.surgery.attention_grafts import OutputNorm


@remedy(
    claim="The variance of attention's output shrinks as the context grows; a norm after attention removes most of "
    "this shift, and models generalise better to longer contexts.",
    claims_tokens=False,
    cites=(Cite("li2025vanishing"), Cite("wang2022foundation", "sub-layernorm")),
    needs={"attention"},
    strength=1.0,
    strength_means="root mean square of attention's output for each token, before the output weights",
    neutral=None,
    learnable=True,
    parameters="none; L if learned (the papers: 2 d L)",
    flops="L norms",
)
def attention_out_norm(case: RemedyCase) -> Sequence[Step]:
    """LayerNorm (no weights) on the output of attention, all heads of a token together, before the output weights."""
    refuse_norm_in_attention(case.view, OUTPUT_NORM, "a norm on the output of attention")
    return (OutputNorm(case.view, case.strength, learnable=case.learnable),)
