"""Normalised queries and keys."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rankscope._citations import Cite
from rankscope.errors import UnsupportedOperationError
from rankscope.models.view import ModelView
from rankscope.remedies._spec import RemedyCase, Step, remedy
from rankscope.stream.operators import is_attention, is_norm
from rankscope.surgery.attention_grafts import QueryKeyNorm

QUERY_KEY_NORM = re.compile(r"^(q|k|qk|query|key)(_?layer)?_?norm$")


@remedy(
    claim="Normalising queries and keys bounds every score by the square root of the head width, whatever the size of "
    "the weights, so that attention does not saturate and training at high learning rates does not diverge.",
    claims_tokens=False,
    cites=(Cite("henry2020querykey"), Cite("dehghani2023scaling")),
    needs={"attention", "training"},
    strength=1.0,
    strength_means="g in the scores g sqrt(d) cos(q, k), with d the width of a head",
    neutral=None,
    learnable=True,
    parameters="none; L if learned (the papers: one per head, or two vectors of the head's width)",
    flops="2 n d L products and 2 n h L norms",
)
def qk_norm(case: RemedyCase) -> Sequence[Step]:
    """Scores g sqrt(d) cos(q, k), with the queries and keys of each head normalised (RMSNorm, no weights)."""
    _refuse_present_norm(case.view)
    return (QueryKeyNorm(case.view, case.strength, learnable=case.learnable),)


def _refuse_present_norm(view: ModelView) -> None:
    """Raise if an attention module of a block contains a norm named like one of queries or keys."""
    modules = view.modules()
    for stack in view.stacks:
        for block in dict.fromkeys(call.module_name for call in stack.calls):
            for name, module in modules[block].named_modules():
                if module is modules[block] or not is_attention(name, type(module)):
                    continue
                for inner, part in module.named_modules():
                    if is_norm(part) and QUERY_KEY_NORM.search(inner.rpartition(".")[2].lower()):
                        path = ".".join(filter(None, (block, name, inner)))
                        raise UnsupportedOperationError(
                            f"This model already has norms on its queries and keys: {path} ({type(part).__name__})."
                        )
