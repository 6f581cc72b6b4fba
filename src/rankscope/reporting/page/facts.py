"""What each metric is: formula, kind, range, value at collapse, source; read from a file, so that torch stays out.

``facts.json`` is written by ``./dev facts`` from the declarations of the metrics and from the bibliography; a test
compares the two.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from rankscope.reporting.page.mathml import mathml
from rankscope.reporting.page.terms import OWN_TERMS

FILE = Path(__file__).with_name("facts.json")
_ROLE = re.compile(r":math:`([^`]*)`|``([^`]*)``|\*\*([^*]*)\*\*")


@dataclass(frozen=True)
class Fact:
    """One entry of the glossary."""

    name: str
    symbol: str
    summary: str
    says: str
    range: str
    at_collapse: float | None
    sources: tuple[str, ...]

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


@dataclass(frozen=True)
class Facts:
    """All that is known about names."""

    metrics: Mapping[str, Fact]
    references: Mapping[str, str]


def markup(text: str) -> str:
    """A docstring's sentence as HTML: formulas drawn, everything else escaped.

    Example:
        >>> markup("a < b, ``mu``, **Exact**")
        'a &lt; b, <code>mu</code>, <strong>Exact</strong>'
    """
    parts, end = [], 0
    for found in _ROLE.finditer(text):
        formula, code, strong = found.groups()
        parts.append(escape(text[end : found.start()]))
        if formula is not None:
            parts.append(mathml(formula))
        else:
            parts.append(f"<code>{escape(code)}</code>" if code is not None else f"<strong>{escape(strong)}</strong>")
        end = found.end()
    return "".join((*parts, escape(text[end:])))


@cache
def read_facts() -> Facts:
    """The file and the terms of the other verbs, read once."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    references: dict[str, str] = content["references"]
    metrics = {
        name: Fact(
            name,
            entry["symbol"],
            entry["summary"],
            entry["says"],
            entry["range"],
            entry["at_collapse"],
            tuple(_source(cite, references) for cite in entry["cites"]),
        )
        for name, entry in content["metrics"].items()
    }
    for term in OWN_TERMS:
        sources = tuple(_source(cite, references) for cite in term.cites)
        metrics[term.name] = Fact(term.name, term.symbol, term.summary, term.says, term.range, None, sources)
    return Facts(metrics, references)


def _source(cite: str, references: Mapping[str, str]) -> str:
    key, _, place = cite.partition(", ")
    words = references.get(key, key)
    return f"{words} {place[:1].upper()}{place[1:]}." if place else words


def source_words(key: str) -> str:
    """The bibliography's line for a key, or the key itself."""
    return read_facts().references.get(key, key)


FACTS = read_facts()
