"""Formulas as MathML, written by the report's own converter: a page needs no script and no network for them."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

from rankscope.reporting.page.mathml import formula

logger = logging.getLogger(__name__)


def converted(node: nodes.Element) -> str:
    """The formula of a node; one that the converter does not know is a warning, which stops the build."""
    try:
        return formula(node.astext())
    except ValueError as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
        return ""


def visit_math(translator: Any, node: nodes.Element) -> None:
    """A formula in a line."""
    translator.body.append(f"<math>{converted(node)}</math>")
    raise nodes.SkipNode


def visit_displayed(translator: Any, node: nodes.Element) -> None:
    """A formula on a line of its own; one that is too wide for the page scrolls."""
    translator.body.append(f'<div class="math"><math display="block">{converted(node)}</math></div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, object]:
    """Register the renderer."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_displayed, None))
    return {"version": "1", "parallel_read_safe": True}
