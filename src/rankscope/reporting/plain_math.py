"""Formulas as one line of Unicode, for terminals."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from rankscope.reporting.page.mathml import mathml

_ROLE = re.compile(r":math:`([^`]*)`|``([^`]*)``")
_SPACED = frozenset("=<>≤≥≈≠∈→+−") | {":="}
_RAISED = {"2": "²", "3": "³", "4": "⁴", "T": "ᵀ", "′": "′"}
_COMBINING = {"¯": "\N{COMBINING MACRON}", "^": "\N{COMBINING CIRCUMFLEX ACCENT}", "~": "\N{COMBINING TILDE}"}


def plain_sentence(text: str) -> str:
    r"""A docstring's sentence without markup, its formulas as :func:`plain_math` writes them.

    Example:
        >>> plain_sentence(r"Energy, :math:`\sum_i s_i^2`; see ``stable_rank``.")
        'Energy, ∑_i s_i²; see stable_rank.'
    """
    return _ROLE.sub(lambda match: plain_math(match[1]) if match[1] is not None else match[2], text)


def plain_math(tex: str) -> str:
    r"""``tex`` in one line; scripts that have no Unicode character follow ``_`` and ``^``. Unknown input is unchanged.

    Example:
        >>> plain_math(r"\|X - 1\bar x^T\|_F / \sqrt{nd}")
        '‖X − 1x̄ᵀ‖_F/√(nd)'
        >>> plain_math(r"\frac{a+b}2 \le e^{H(p)}")
        '(a + b)/2 ≤ e^(H(p))'
    """
    try:
        # The markup is our own, from the same declarations as the pages.
        root = ElementTree.fromstring(mathml(tex))
    except ElementTree.ParseError:
        return tex
    if root.tag != "math":
        return tex
    apart = re.sub(r"(?<=\d)(?=[∑∏]|max|min)", " ", _text(root))
    return re.sub(r"(?<=max|min) (?=\()| (?= )", "", apart).strip()


def _text(node: ElementTree.Element) -> str:
    parts = [_text(child) for child in node]
    match node.tag:
        case "mo":
            return _sign(node)
        case "mspace":
            return " " if float(node.get("width", "0em").removesuffix("em")) > 0 else ""
        case "msub" | "munder":
            return _lowered(node, parts) + _gap(node)
        case "msup" | "mover" if node.get("accent") is None:
            return parts[0].rstrip() + _raised(parts[1]) + _gap(node)
        case "msubsup" | "munderover":
            return _lowered(node, parts) + _raised(parts[2]) + _gap(node)
        case "mover":
            return parts[0] + _COMBINING.get(parts[1], parts[1])
        case "msqrt":
            inside = "".join(parts)
            return f"√{inside}" if len(inside) == 1 or inside.isdigit() else f"√({inside})"
        case "mfrac":
            return f"{_grouped(parts[0])}/{_grouped(parts[1])}"
    if node.get("class") == "over":
        return f"mean({''.join(parts)})"
    return (node.text or "") + "".join(parts)


def _sign(node: ElementTree.Element) -> str:
    sign = node.text or ""
    if node.get("movablelimits"):
        return sign + " "
    if node.get("form") == "prefix":
        return sign
    return f" {sign} " if sign in _SPACED else f"{sign} " if sign == "," else sign


def _gap(node: ElementTree.Element) -> str:
    """A space after a sum with limits, so that the limit does not run into the summand."""
    return " " if node[0].get("movablelimits") else ""


def _lowered(node: ElementTree.Element, parts: list[str]) -> str:
    script = _grouped(parts[1].replace(" ", ""))
    named = node[0].tag == "mi" and len(parts[0]) > 1
    return f"{parts[0].rstrip()}_{script}" + (" " if named else "")


def _raised(script: str) -> str:
    return _RAISED.get(script.strip()) or f"^{_grouped(script)}"


def _grouped(script: str) -> str:
    script = script.strip()
    return script if len(script) == 1 or script.isalnum() else f"({script})"
