"""Words that the verbs use beside the registered metrics, explained the same way."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """A column of a result that is no registered metric; fields as in :class:`rankscope.reporting.page.facts.Fact`."""

    name: str
    symbol: str
    summary: str
    says: str
    range: str = ""
    cites: tuple[str, ...] = ()


OWN_TERMS = (
    Term(
        "log10_residual",
        r"\log_{10} \|\mathrm{res}(X)\|_F",
        "Decimal logarithm of the distance of the tokens from being equal.",
        "**Exact**: carried as base plus scaled deviation, it does not meet the float floor.",
        "any number",
        ("dong2021attention",),
    ),
    Term(
        "log10_relative_residual",
        r"\log_{10} (\|\mathrm{res}(X)\|_F / \|X\|_F)",
        "Decimal logarithm of the residual over the norm.",
        "**Exact.** 0 when the mean is zero; −16 is about where float64 ends.",
        "up to 0",
        ("dong2021attention",),
    ),
    Term(
        "digits_of_agreement",
        r"-\log_{10} (\|\mathrm{res}(X)\|_F / \|X\|_F)",
        "Decimal digits in which the tokens agree.",
        "On a logarithmic axis a block of order 3 multiplies it by three: a straight line.",
        "0 and up",
        ("dong2021attention",),
    ),
    Term(
        "order",
        "p",
        "The power of a block on a small residual: the new one is a constant times the old one to this power.",
        "**Exact** where the residual is small. 3 for attention alone (each block cubes it), 1 for a block that "
        "multiplies it by a constant.",
        "",
        ("dong2021attention", "wu2024role"),
    ),
    Term(
        "factor",
        r"\|\mathrm{res}(X_{l+1})\| / \|\mathrm{res}(X_l)\|",
        "What a block multiplies the residual by.",
        "**Exact.** Below 1 the tokens come together, above 1 they part.",
        "0 and up",
    ),
    Term(
        "linear_factor",
        "",
        "What a block multiplies an infinitesimal residual by.",
        "**Exact**, from a forward-mode derivative around equal tokens.",
        "0 and up",
    ),
    Term(
        "projection_share",
        r"\langle Y_k, Y\rangle / \|Y\|_F^2",
        "Share of the output that lies in the sum of all paths of one kind.",
        "**Exact.** The shares of all lengths sum to one; a share may be negative where paths cancel.",
        "any number",
        ("dong2021attention",),
    ),
    Term(
        "norm_share",
        r"\|Y_k\|_F / \|Y\|_F",
        "Size of the sum of all paths of one kind over the size of the output.",
        "**Exact.** They do not sum to one: paths may cancel.",
        "0 and up",
    ),
    Term(
        "log10_measured",
        "",
        "Decimal logarithm of the quantity that the theorem speaks about, as measured.",
        "Which quantity it is differs from theorem to theorem: the residual after a layer, its ratio to the one "
        "before, an entropy.",
    ),
    Term(
        "log10_slack",
        r"\log_{10} (\mathrm{bound} / \mathrm{measured})",
        "Decades between the bound and what was measured.",
        "**Exact.** 0 where the bound is sharp. Below 0 by more than rounding the bound is broken: a hypothesis is "
        "not met, or the verdict says that it is violated.",
        "0 and up",
    ),
    Term(
        "margin",
        "",
        "By how much a hypothesis of a theorem is met.",
        "**Exact.** Below 0 it is not met, and the theorem says nothing about this network.",
    ),
)
