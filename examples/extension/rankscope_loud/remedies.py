"""A remedy."""

from collections.abc import Sequence

from rankscope.remedies import Cite, RemedyCase, Step, remedy
from rankscope.surgery import BranchGains


@remedy(
    claim="With small branches a deep network begins close to the identity, and its tokens stay apart.",
    claims_tokens=True,
    cites=(Cite("noci2022signal"),),
    needs={"skips"},
    strength=0.5,
    strength_means="factor on every branch",
    neutral=1.0,
    learnable=False,
    parameters="none",
    flops="2 n d L products",
)
def small_branches(case: RemedyCase) -> Sequence[Step]:
    """Every branch times one number."""
    return (BranchGains(case.view, case.strength, case.strength, learnable=False),)
