"""Directives whose content is made from the package's own declarations or from test output, never typed by hand.

``metrics-table``
    One row per registered metric of a side, from the registry.
``sites-table``
    One row per site, from the vocabulary.
``compatibility-table``
    One row per model, from ``docs/data/compatibility.json``, which the family tests write.
``project-links``
    One line with the addresses of ``pyproject.toml``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomllib
from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.util.docutils import SphinxDirective

if TYPE_CHECKING:
    from rankscope.metrics._spec import MetricSpec

COMPATIBILITY = Path(__file__).parents[1] / "data" / "compatibility.json"
PROJECT = Path(__file__).parents[2] / "pyproject.toml"
PROJECT_URLS: dict[str, str] = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]["urls"]
"""Where the project lives: the only place that pages take its addresses from."""


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; a bar inside a cell is escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines]


class GeneratedTable(SphinxDirective):
    """Parses the Markdown lines that a subclass makes."""

    def lines(self) -> list[str]:
        raise NotImplementedError

    def run(self) -> list[nodes.Node]:
        return self.parse_text_to_nodes(StringList(self.lines(), source=type(self).__name__))


class SitesTable(GeneratedTable):
    def lines(self) -> list[str]:
        from rankscope.stream.sites import SITES

        return markdown_table(["site", "what is measured there"], ([f"`{name}`", text] for name, text in SITES.items()))


class ProjectLinks(GeneratedTable):
    """The addresses of ``pyproject.toml`` but for that of the pages themselves."""

    def lines(self) -> list[str]:
        self.env.note_dependency(str(PROJECT))
        return [" · ".join(f"[{name}]({url})" for name, url in PROJECT_URLS.items() if name != "Documentation")]


class MetricsTable(GeneratedTable):
    """The argument is a side, such as ``tokens``; see ``SIDES``."""

    required_arguments = 1
    header = ("metric", "symbol", "", "range", "at collapse", "unchanged by", "needs", "source")

    def lines(self) -> list[str]:
        from rankscope import METRICS

        chosen = [spec for spec in METRICS.values() if spec.side == self.arguments[0]]
        return markdown_table(self.header, (self.cells(spec) for spec in chosen))

    def cells(self, spec: MetricSpec) -> list[str]:
        low, high = (f"{end:g}".replace("inf", "∞") for end in spec.range)
        changes = [
            str(flag.name).lower().replace("_", " ") for flag in type(spec.invariant_to) if flag in spec.invariant_to
        ]
        sources = "; ".join(f"{{cite}}`{c.key}`" + (f", {c.place}" if c.place else "") for c in spec.cites)
        collapse = "" if spec.at_collapse is None else f"{spec.at_collapse:g}"
        name, symbol = f"`{spec.name}`", f"${spec.symbol}$"
        return [
            name,
            symbol,
            as_markdown(spec.summary),
            f"{low} to {high}",
            collapse,
            ", ".join(changes),
            spec.needs,
            sources,
        ]


def as_markdown(docstring: str) -> str:
    """The roles that docstrings use, in Markdown."""
    return re.sub(r":math:`([^`]*)`", r"$\1$", docstring).replace("``", "`")


class CompatibilityTable(GeneratedTable):
    """Reads ``{model: {"architecture", "stacks": [...], "checks": {name: status}, "refused": {name: why}}}``."""

    header = ("model", "class", "blocks at", "skip additions", "attention", "bit-identical", "not measured, and why")

    def lines(self) -> list[str]:
        self.env.note_dependency(str(COMPATIBILITY))
        if not COMPATIBILITY.is_file():
            raise ExtensionError(f"{COMPATIBILITY} is missing. Write it with: ./dev compatibility")
        models = json.loads(COMPATIBILITY.read_text(encoding="utf-8"))
        same = sum(facts["checks"].get("parity") == "pass" for facts in models.values())
        rows = (
            [f"`{name}`" if name.startswith("tiny-") else name, *compatibility_cells(facts)]
            for name, facts in models.items()
        )
        return [
            f"{same} of {len(models)} models are measured with bit-identical output.",
            "",
            *markdown_table(self.header, rows),
        ]


def compatibility_cells(facts: dict[str, Any]) -> list[str]:
    """What doctor found in one model, as the cells of a row."""
    stacks, checks = facts["stacks"], facts["checks"]
    parity = {"pass": "yes", "fail": "**no**"}.get(checks.get("parity"), "")
    attention = {"pass": "read", "info": "read; a sink takes part of each row"}.get(checks.get("attention"), "not read")
    return [
        facts["architecture"],
        "; ".join(f"`{stack['blocks']}`" for stack in stacks),
        "; ".join(" or ".join(kind or "none" for kind in stack["skips"]) for stack in stacks),
        attention if stacks else "",
        parity,
        " ".join(f"{name}: {why}" for name, why in facts["refused"].items()).replace("*", r"\*"),
    ]


def setup(app: Sphinx) -> dict[str, object]:
    """Register the directives."""
    app.add_directive("metrics-table", MetricsTable)
    app.add_directive("sites-table", SitesTable)
    app.add_directive("compatibility-table", CompatibilityTable)
    app.add_directive("project-links", ProjectLinks)
    return {"version": "1", "parallel_read_safe": True}
