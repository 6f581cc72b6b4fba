"""Formulas as MathML, which browsers render: a page needs no script and no network for them."""

from __future__ import annotations

from rankscope.errors import MissingExtraError


def mathml(tex: str, *, displayed: bool = False) -> str:
    r"""``tex``, from a declaration or a page of the documentation, as a ``<math>`` element.

    Args:
        tex: the formula. It is not escaped, so it must not come from a file of somebody else.
        displayed: whether it stands on a line of its own.

    Raises:
        ValueError: a command in it is unknown; the message names it.
        MissingExtraError: without latex2mathml (extra ``report``).

    Example:
        >>> mathml("x")
        '<math xmlns="http://www.w3.org/1998/Math/MathML" display="inline"><mrow><mi>x</mi></mrow></math>'
    """
    try:
        from latex2mathml.converter import convert
    except ImportError as error:
        raise MissingExtraError("A formula on a page", "latex2mathml", "report") from error
    drawn: str = convert(tex, display="block" if displayed else "inline")
    # The converter passes an unknown command through as an identifier.
    if "<mi>\\" in drawn:
        unknown = drawn.partition("<mi>\\")[2].partition("<")[0]
        raise ValueError(f"\\{unknown} is not known")
    return drawn
