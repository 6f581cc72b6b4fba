"""Masks as text: ``causal_window(4) | sink(1)``.

A tokenizer and a recursive-descent parser; nothing is evaluated. ``~`` binds tightest, then ``&``, then ``|``.

    union        = intersection { "|" intersection }
    intersection = factor { "&" factor }
    factor       = "~" factor | "(" union ")" | call
    call         = name [ "(" [ argument { "," argument } ] ")" ]
    argument     = [ name "=" ] ( integer | string )
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import NoReturn

from rankscope.errors import InputError
from rankscope.masks._mask import Mask, both, complement, either
from rankscope.masks._spec import Value, make

LENGTH_LIMIT = 20_000
DEPTH_LIMIT = 50
DIGIT_LIMIT = 20

_TOKEN = re.compile(
    r"""\s*(?:(?P<name>[A-Za-z_][A-Za-z_0-9]*)
          |(?P<integer>-?[0-9]+)
          |(?P<string>"(?:[^"\\]|\\.)*"|'[^'\\]*')
          |(?P<sign>[|&~(),=])
          |(?P<end>\Z))""",
    re.VERBOSE,
)


@dataclass(frozen=True)
class _Token:
    kind: str
    text: str
    place: int


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
    return _Parser(expression).whole()


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = self._tokenized()
        self.at = 0
        self.depth = 0

    def whole(self) -> Mask:
        mask = self._union()
        if self._next.kind != "end":
            self._fail("an operator '|' or '&', or the end")
        return mask

    def _tokenized(self) -> list[_Token]:
        tokens: list[_Token] = []
        place = 0
        while not tokens or tokens[-1].kind != "end":
            match = _TOKEN.match(self.text, place)
            if match is None or match.lastgroup is None:
                place += len(self.text[place:]) - len(self.text[place:].lstrip())
                self._fail_at(place, f"{self.text[place]!r} has no meaning in a mask expression")
            tokens.append(_Token(match.lastgroup, match[match.lastgroup], match.start(match.lastgroup)))
            place = match.end()
        return tokens

    @property
    def _next(self) -> _Token:
        return self.tokens[self.at]

    def _take(self, sign: str) -> bool:
        is_next = self._next.kind == "sign" and self._next.text == sign
        self.at += is_next
        return is_next

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            self._fail(f"'{sign}'")

    def _union(self) -> Mask:
        parts = [self._intersection()]
        while self._take("|"):
            parts.append(self._intersection())
        return either(*parts)

    def _intersection(self) -> Mask:
        parts = [self._factor()]
        while self._take("&"):
            parts.append(self._factor())
        return both(*parts)

    def _factor(self) -> Mask:
        self.depth += 1
        if self.depth > DEPTH_LIMIT:
            self._fail_at(self._next.place, f"more than {DEPTH_LIMIT} levels of parentheses and '~'")
        if self._take("~"):
            mask = complement(self._factor())
        elif self._take("("):
            mask = self._union()
            self._expect(")")
        else:
            mask = self._call()
        self.depth -= 1
        return mask

    def _call(self) -> Mask:
        if self._next.kind != "name":
            self._fail("the name of a mask, '~' or '('")
        name = self._next.text
        self.at += 1
        values: list[Value] = []
        named: dict[str, Value] = {}
        if self._take("(") and not self._take(")"):
            self._argument(values, named)
            while self._take(","):
                self._argument(values, named)
            self._expect(")")
        return make(name, tuple(values), named)

    def _argument(self, values: list[Value], named: dict[str, Value]) -> None:
        if self._next.kind != "name":
            if named:
                self._fail("a named parameter, since one before it was named")
            values.append(self._value())
            return
        name = self._next.text
        self.at += 1
        self._expect("=")
        if name in named:
            self._fail_at(self._next.place, f"{name} is given twice")
        named[name] = self._value()

    def _value(self) -> Value:
        token = self._next
        if token.kind not in {"integer", "string"}:
            self._fail("a whole number or a string")
        self.at += 1
        if token.kind == "integer":
            if len(token.text) > DIGIT_LIMIT:
                self._fail_at(token.place, f"a number has at most {DIGIT_LIMIT} digits")
            return int(token.text)
        if token.text.startswith("'"):
            return token.text[1:-1]
        try:
            return str(json.loads(token.text))
        except ValueError:
            self._fail_at(token.place, "this string is not written as JSON writes it")

    def _fail(self, expected: str) -> NoReturn:
        got = "the end" if self._next.kind == "end" else repr(self._next.text[:40])
        self._fail_at(self._next.place, f"expected {expected}, got {got}")

    def _fail_at(self, place: int, why: str) -> NoReturn:
        start = max(0, place - 30)
        raise InputError(
            f"Not a mask expression, at character {place + 1}: {why}.\n"
            f"  {self.text[start : place + 30]!r}\n"
            "Write names of masks with their parameters, joined by |, & and ~, e.g. 'causal_window(4) | sink(1)'; "
            "`rankscope ls masks` lists them."
        )
