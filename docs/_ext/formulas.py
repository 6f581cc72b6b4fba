"""Formulas as MathML: a page needs no script and no network for them."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

from rankscope.reporting.page.mathml import mathml

logger = logging.getLogger(__name__)


def converted(node: nodes.Element, *, displayed: bool) -> str:
    """The formula of a node; one that cannot be converted is a warning, which stops the build."""
    try:
        return mathml(node.astext(), displayed=displayed)
    except Exception as error:  # noqa: BLE001 the converter has an exception of its own for each mistake
        logger.warning("formula %r: %s %s", node.astext(), type(error).__name__, error, location=node)
        return ""


def visit_math(translator: Any, node: nodes.Element) -> None:
    """A formula in a line."""
    translator.body.append(converted(node, displayed=False))
    raise nodes.SkipNode


def visit_displayed(translator: Any, node: nodes.Element) -> None:
    """A formula on a line of its own; one that is too wide for the page scrolls."""
    translator.body.append(f'<div class="math">{converted(node, displayed=True)}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, object]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_displayed, None))
    return {"version": "1", "parallel_read_safe": True}
