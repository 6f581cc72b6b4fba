"""Masks as text: ``causal_window(4) | sink(1)``.

The syntax is that of a Python expression of calls, ``|``, ``&`` and ``~``. Python parses it; nothing is evaluated.
"""

from __future__ import annotations

import ast
import re
from typing import NoReturn

from rankscope.errors import InputError
from rankscope.masks._mask import Mask, both, complement, either
from rankscope.masks._spec import MASKS

LENGTH_LIMIT = 20_000
SIGN_LIMIT = 500
"""Operators and parentheses, which nest: more could exhaust the stack of Python's own parser."""

# Everything that may occur: names, integers, strings as JSON writes them, and signs. Python would warn of other escapes
# in strings, and of a number that is followed by a letter.
_TOKENS = re.compile(
    r"""(?:[ \t]|[A-Za-z_]\w*(?!\w)|-?[0-9]+(?!\w)|[|&~(),=]|"(?:[^"\\\n]|\\["\\bfnrtu])*"|'[^'\\\n]*')*""", re.ASCII
)


def parse_mask(expression: str) -> Mask:
    """Parse a mask expression.

    Args:
        expression: names of registered masks with parameters, joined by ``|``, ``&``, ``~`` and parentheses.

    Raises:
        InputError: the text is not a valid expression; the message points at the position.
        UnknownNameError: a mask or a parameter that does not exist.

    Example:
        >>> print(parse_mask("causal_window(width=4) | sink(1)"))
        causal_window(4) | sink(1)
        >>> parse_mask("~(causal | window(1))").dense(4, allow_empty=True).int().tolist()[0]
        [0, 0, 1, 1]
    """
    if not isinstance(expression, str):
        raise InputError(f"A mask expression is a string such as 'causal | sink(1)', not {type(expression).__name__}.")
    if len(expression) > LENGTH_LIMIT:
        raise InputError(f"A mask expression has at most {LENGTH_LIMIT:,} characters, this one {len(expression):,}.")
    text = expression.strip()
    known = _TOKENS.match(text)
    if known is not None and known.end() < len(text):
        _fail(text, known.end(), f"{text[known.end()]!r} has no meaning in a mask expression")
    if sum(map(text.count, "|&~(")) > SIGN_LIMIT:
        raise InputError(f"A mask expression has at most {SIGN_LIMIT} operators and parentheses.")
    try:
        tree = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        _fail(text, (error.offset or 1) - 1, error.msg)
    except (RecursionError, MemoryError):
        _fail(text, 0, "it is nested too deeply")
    return _mask(tree, text)


def _mask(node: ast.expr, text: str) -> Mask:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.BitAnd)):
        join = either if isinstance(node.op, ast.BitOr) else both
        return join(_mask(node.left, text), _mask(node.right, text))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return complement(_mask(node.operand, text))
    if isinstance(node, ast.Name):
        return MASKS[node.id]()
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        _fail(text, node.col_offset, "expected the name of a mask, '~' or '('")
    names = [str(keyword.arg) for keyword in node.keywords]
    if repeated := [name for name in names if names.count(name) > 1]:
        _fail(text, node.col_offset, f"{repeated[0]} is given twice")
    try:
        values = [ast.literal_eval(value) for value in node.args]
        named = {name: ast.literal_eval(keyword.value) for name, keyword in zip(names, node.keywords, strict=True)}
    except ValueError:
        _fail(text, node.col_offset, f"the parameters of {node.func.id} are whole numbers or strings")
    return MASKS[node.func.id](*values, **named)


def _fail(text: str, place: int, why: str) -> NoReturn:
    raise InputError(
        f"Not a mask expression, at character {place + 1}: {why}.\n"
        f"  {text[max(0, place - 30) : place + 30]!r}\n"
        "Write names of masks with their parameters, joined by |, & and ~, e.g. 'causal_window(4) | sink(1)'; "
        "`rankscope ls masks` lists them."
    )
