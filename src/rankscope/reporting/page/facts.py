"""Reference data of each metric and column: formula, kind, range, value at collapse, source.

``facts.json`` is written by ``./dev facts`` from the declarations of the metrics and from the bibliography; a test
compares the two. It is a file so that this module need not import torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from rankscope.reporting.page.mathml import mathml


@dataclass(frozen=True)
class Fact:
    """One entry of the glossary."""

    name: str
    symbol: str
    summary: str
    says: str
    range: str = ""
    sources: tuple[str, ...] = ()
    at_collapse: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The range as two numbers; NaN if it is given in words."""
        said = re.fullmatch(r"(-?[\d.∞]+) to ([\d.∞]+)", self.range)
        low, high = (math.nan, math.nan) if said is None else (float(end.replace("∞", "inf")) for end in said.groups())
        return low, high

    @property
    def formula(self) -> str:
        """The symbol as MathML; safe markup."""
        return mathml(self.symbol) if self.symbol else ""

    @property
    def summary_markup(self) -> str:
        """The summary with its formulas as MathML; safe markup."""
        return markup(self.summary)

    @property
    def says_markup(self) -> str:
        """Kind, ends of the range and undefined cases; safe markup."""
        return markup(self.says)


OWN_TERMS = (
    Fact(
        "log10_residual",
        r"\log_{10} \|\mathrm{res}(X)\|_F",
        "Decimal logarithm of the distance of the tokens from being equal.",
        "**Exact**: computed as base plus scaled deviation, it does not reach the float floor.",
        "any number",
        ("dong2021attention",),
    ),
    Fact(
        "log10_relative_residual",
        r"\log_{10} (\|\mathrm{res}(X)\|_F / \|X\|_F)",
        "Decimal logarithm of the residual over the norm.",
        "**Exact.** 0 when the mean is zero; −16 is about where float64 ends.",
        "up to 0",
        ("dong2021attention",),
    ),
    Fact(
        "digits_of_agreement",
        r"-\log_{10} (\|\mathrm{res}(X)\|_F / \|X\|_F)",
        "Decimal digits in which the tokens agree.",
        "On a logarithmic axis a block of order 3 multiplies it by three: a straight line.",
        "0 and up",
        ("dong2021attention",),
    ),
    Fact(
        "order",
        "p",
        "The power of a block on a small residual: the new one is a constant times the old one to this power.",
        "**Exact** where the residual is small. 3 for attention alone (each block cubes it), 1 for a block that "
        "multiplies it by a constant.",
        "",
        ("dong2021attention", "wu2024role"),
    ),
    Fact(
        "factor",
        r"\|\mathrm{res}(X_{l+1})\| / \|\mathrm{res}(X_l)\|",
        "What a block multiplies the residual by.",
        "**Exact.** Below 1 the tokens come together, above 1 they part.",
        "0 and up",
    ),
    Fact(
        "linear_factor",
        "",
        "What a block multiplies an infinitesimal residual by.",
        "**Exact**, from a forward-mode derivative around equal tokens.",
        "0 and up",
    ),
    Fact(
        "projection_share",
        r"\langle Y_k, Y\rangle / \|Y\|_F^2",
        "Share of the output that lies in the sum of all paths of one kind.",
        "**Exact.** The shares of all lengths sum to one; a share may be negative where paths cancel.",
        "any number",
        ("dong2021attention",),
    ),
    Fact(
        "norm_share",
        r"\|Y_k\|_F / \|Y\|_F",
        "Size of the sum of all paths of one kind over the size of the output.",
        "**Exact.** They do not sum to one: paths may cancel.",
        "0 and up",
    ),
    Fact(
        "log10_measured",
        "",
        "Decimal logarithm of the quantity that the theorem speaks about, as measured.",
        "Which quantity it is differs from theorem to theorem: the residual after a layer, its ratio to the one "
        "before, an entropy.",
    ),
    Fact(
        "log10_slack",
        r"\log_{10} (\mathrm{bound} / \mathrm{measured})",
        "Decades between the bound and what was measured.",
        "**Exact.** 0 where the bound is sharp. Below 0 by more than rounding the bound is broken: a hypothesis is "
        "not met, or the verdict says that it is violated.",
        "0 and up",
    ),
    Fact(
        "margin",
        "",
        "By how much a hypothesis of a theorem is met.",
        "**Exact.** Below 0 it is not met, and the theorem says nothing about this network.",
    ),
)


FILE = Path(__file__).with_name("facts.json")
_ROLE = re.compile(r":math:`([^`]*)`|``([^`]*)``|\*\*([^*]*)\*\*")


@dataclass(frozen=True)
class Facts:
    """The glossary by name."""

    metrics: Mapping[str, Fact]
    references: Mapping[str, str]


def markup(text: str) -> str:
    """A sentence of a docstring as HTML: formulas as MathML, everything else escaped.

    Example:
        >>> markup("a < b, ``mu``, **Exact**")
        'a &lt; b, <code>mu</code>, <strong>Exact</strong>'
    """
    parts, end = [], 0
    for role in _ROLE.finditer(text):
        formula, code, strong = role.groups()
        parts.append(escape(text[end : role.start()]))
        if formula is not None:
            parts.append(mathml(formula))
        else:
            parts.append(f"<code>{escape(code)}</code>" if code is not None else f"<strong>{escape(strong)}</strong>")
        end = role.end()
    return "".join((*parts, escape(text[end:])))


@cache
def read_facts() -> Facts:
    """The file and the terms of the other verbs, cached."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    references: dict[str, str] = content["references"]
    metrics = {
        name: Fact(
            name,
            entry["symbol"],
            entry["summary"],
            entry["says"],
            entry["range"],
            tuple(_source(cite, references) for cite in entry["cites"]),
            entry["at_collapse"],
        )
        for name, entry in content["metrics"].items()
    }
    for term in OWN_TERMS:
        metrics[term.name] = replace(term, sources=tuple(_source(cite, references) for cite in term.sources))
    return Facts(metrics, references)


def _source(cite: str, references: Mapping[str, str]) -> str:
    key, _, place = cite.partition(", ")
    words = references.get(key, key)
    return f"{words} {place[:1].upper()}{place[1:]}." if place else words


def source_words(key: str) -> str:
    """The bibliography's line for a key, or the key itself."""
    return read_facts().references.get(key, key)


FACTS = read_facts()
