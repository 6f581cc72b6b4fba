"""Renders the page: templates with escaped text, inline script and style, no external resources."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from typing import Any

from rankscope._version import __version__
from rankscope.errors import MissingExtraError
from rankscope.reporting.page.charts import Chart
from rankscope.reporting.page.facts import FACTS, Fact
from rankscope.reporting.page.safe_text import clipped, slug, spoken, visible, with_powers
from rankscope.stream.sites import POOLED_SITES, SITES
from rankscope.views import Column, Section, Table
from rankscope.views.palette import DARK, LIGHT, css_variables

CHANGE = re.compile(r"^Change: .*?write `([^`]+)` instead of `([^`]+)`")
SCRIPTS = ("scales.js", "lines.js", "shapes.js", "page.js")


@dataclass(frozen=True)
class Missing:
    """A result that was not measured, and the command that measures it."""

    what: str
    command: str


@dataclass(frozen=True)
class Chapter:
    """Everything about one run (or one comparison)."""

    title: str
    question: str
    state: str
    headline: str
    verdict: Sequence[str]
    tiles: Sequence[tuple[str, str]]
    sections: Sequence[Section]
    next_steps: Sequence[str] = ()
    evidence: Table | None = None
    notes: Sequence[str] = ()
    missing: Sequence[Missing] = ()
    origin: Sequence[tuple[str, str]] = ()
    command: str = ""
    anchor: str = field(default="", compare=False)


def render(title: str, chapters: Sequence[Chapter], together: Sequence[Section], command: str) -> str:
    """Render one self-contained HTML document.

    Args:
        title: title of the document.
        chapters: one per run, in order.
        together: sections before the chapters.
        command: command that recreates this file.

    Raises:
        MissingExtraError: without Jinja2.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise MissingExtraError("rankscope.report", "jinja2", "report") from error
    environment = Environment(
        loader=PackageLoader("rankscope.reporting.page", "assets"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    charts: list[dict[str, Any]] = []
    environment.filters["slug"] = slug
    environment.filters["powers"] = lambda text: Markup(with_powers(text))
    environment.globals["place"] = lambda chart: _place(charts, chart)
    environment.globals["charts_json"] = lambda: Markup(_json(charts))
    environment.tests["chart"] = lambda part: isinstance(part, Chart)
    environment.filters["visible"] = visible
    environment.filters["changes"] = CHANGE.findall
    environment.filters["heading"] = _heading
    environment.filters["classes"] = lambda cell, column: " ".join(filter(None, (column.width, *cell.marks)))
    script = "\n".join(_asset(name) for name in SCRIPTS)
    numbered = [replace(chapter, anchor=f"run-{number}") for number, chapter in enumerate(chapters, 1)]
    glossary = glossary_of(numbered, together)
    body: str = environment.get_template("page.html.j2").render(
        title=clipped(title),
        chapters=numbered,
        together=together,
        command=command,
        glossary=glossary,
        terms={fact.name for fact in glossary},
        sites=_sites_shown(numbered, together),
        version=__version__,
        style=_style(),
        script=script,
        script_hash=_hash(script),
    )
    return body


def glossary_of(chapters: Sequence[Chapter], together: Sequence[Section]) -> list[Fact]:
    """Glossary entries of the names used in the report, in the order of the names."""
    used: set[str] = set()
    for part in _parts(chapters, together):
        if isinstance(part, Chart):
            used |= {str(view["metric"]) for view in part.views.values()}
        else:
            used |= {column.term for column in part.head if column.term}
            used |= {cell.term for row in part.body for cell in row if cell.term}
    return [FACTS.metrics[name] for name in sorted(used & set(FACTS.metrics))]


def _sites_shown(chapters: Sequence[Chapter], together: Sequence[Section]) -> dict[str, str]:
    keys = {
        word for part in _parts(chapters, together) if isinstance(part, Chart) for key in part.views for word in key
    }
    return {name: meaning for name, meaning in {**SITES, **POOLED_SITES}.items() if name in keys}


def _parts(chapters: Sequence[Chapter], together: Sequence[Section]) -> Iterator[Chart | Table]:
    for section in (*together, *(section for chapter in chapters for section in chapter.sections)):
        yield from section.parts
    yield from (chapter.evidence for chapter in chapters if chapter.evidence is not None)


def _heading(column: Column) -> str:
    """The name of a column, with metric names in words."""
    return spoken(column.name) if column.term else column.name


def _place(charts: list[dict[str, Any]], chart: Chart) -> int:
    charts.append(chart.payload())
    return len(charts) - 1


def _json(value: object) -> str:
    """JSON that cannot close the HTML element it is in."""
    # "</script>" and "<!--" would end or change the element even inside a JSON string.
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return (files("rankscope.reporting.page") / "assets" / name).read_text(encoding="utf-8")


def _style() -> str:
    """The style sheet, with the colours of both themes; the reader's choice overrides the system's."""
    light, dark = css_variables(LIGHT), f"{css_variables(DARK)} color-scheme: dark;"
    return (
        f":root {{ {light} }}\n"
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark} }} }}\n'
        f':root[data-theme="dark"] {{ {dark} }}\n'
        f"{_asset('style.css')}"
    )


def _hash(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
