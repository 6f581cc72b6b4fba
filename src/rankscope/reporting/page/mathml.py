"""The small part of LaTeX that metric declarations use, converted to MathML, which browsers render natively."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|[{}_^]|[A-Za-z]|\S")
SYMBOLS = {
    "|": "‖", "infty": "∞", "sum": "∑", "prod": "∏", "le": "≤", "ge": "≥", "cdot": "·", "times": "×", "to": "→",
    "in": "∈", "ne": "≠", "approx": "≈", "ldots": "…", "pm": "±", "lVert": "‖", "rVert": "‖", "colon": ":",
    "{": "{", "}": "}", "langle": "⟨", "rangle": "⟩",
}  # fmt: skip
LETTERS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ε", "eta": "η", "theta": "θ", "kappa": "κ",
    "lambda": "λ", "mu": "μ", "nu": "ν", "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ", "omega": "ω",
    "ell": "ℓ", "Sigma": "Σ", "Lambda": "Λ", "Delta": "Δ", "Gamma": "Γ",
}  # fmt: skip
FUNCTIONS = ("min", "max", "log", "exp", "cos", "sin", "sup", "inf", "det", "tr", "lim", "dim")
SPACES = (",", ";", ":", "!", " ", "quad", "left", "right", "big", "Big")
WRAPPED = {
    "mathrm": "<mi mathvariant='normal'>{}</mi>",
    "text": "<mtext>{}</mtext>",
    "operatorname": "<mi mathvariant='normal'>{}</mi>",
}
ACCENTS = {"bar": "¯", "hat": "^", "tilde": "~"}


def mathml(tex: str) -> str:
    r"""``tex`` as a ``<math>`` element; unsupported input is shown verbatim.

    Example:
        >>> mathml(r"x_i^2")
        '<math><msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup></math>'
        >>> mathml(r"\unknown x")
        '<code>\\unknown x</code>'
    """
    try:
        return f"<math>{''.join(_row(_Reader(tex)))}</math>"
    except ValueError:
        return f"<code>{escape(tex)}</code>"


class _Reader:
    """Token stream with one token of lookahead."""

    def __init__(self, tex: str) -> None:
        self.tokens = _TOKEN.findall(tex)
        self.at = 0

    def peek(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def next(self) -> str:
        token = self.peek()
        if not token:
            raise ValueError("the formula ends early")
        self.at += 1
        return token


def _row(reader: _Reader, until: str = "") -> Iterator[str]:
    while reader.peek() != until:
        if reader.peek() == "}":
            raise ValueError("a brace too many")
        yield _scripted(reader)
    if until:
        reader.next()


def _scripted(reader: _Reader) -> str:
    base = _atom(reader)
    scripts: dict[str, str] = {}
    while reader.peek() in ("_", "^"):
        place = reader.next()
        scripts[place] = _atom(reader)
    if len(scripts) == 2:
        return f"<msubsup>{base}{scripts['_']}{scripts['^']}</msubsup>"
    if "_" in scripts:
        return f"<msub>{base}{scripts['_']}</msub>"
    return f"<msup>{base}{scripts['^']}</msup>" if scripts else base


def _atom(reader: _Reader) -> str:
    token = reader.next()
    if token == "{":
        return f"<mrow>{''.join(_row(reader, '}'))}</mrow>"
    if token.startswith("\\"):
        return _command(token[1:], reader)
    if token[0].isdigit():
        return f"<mn>{token}</mn>"
    if token.isalpha():
        return f"<mi>{escape(token)}</mi>"
    return f"<mo stretchy='false'>{escape(token.replace('-', '−'))}</mo>"


def _command(name: str, reader: _Reader) -> str:
    if name in SYMBOLS:
        return f"<mo stretchy='false'>{SYMBOLS[name]}</mo>"
    if name in LETTERS:
        return f"<mi>{LETTERS[name]}</mi>"
    if name in FUNCTIONS:
        return f"<mi mathvariant='normal'>{name}</mi><mspace width='0.16em'></mspace>"
    if name in SPACES:
        return "<mspace width='0.16em'></mspace>"
    if name in WRAPPED:
        return WRAPPED[name].format(escape("".join(_raw(reader))))
    if name == "overline":
        return f"<mrow class='over'>{_atom(reader)}</mrow>"
    if name in ACCENTS:
        return f"<mover accent='true'>{_atom(reader)}<mo stretchy='true'>{ACCENTS[name]}</mo></mover>"
    if name == "sqrt":
        return f"<msqrt>{_atom(reader)}</msqrt>"
    if name == "frac":
        return f"<mfrac>{_atom(reader)}{_atom(reader)}</mfrac>"
    raise ValueError(f"\\{name} is not known")


def _raw(reader: _Reader) -> Iterator[str]:
    """The letters between braces, verbatim."""
    if reader.next() != "{":
        raise ValueError("braces were expected")
    while (token := reader.next()) != "}":
        if token.startswith("\\") or token == "{":
            raise ValueError("letters were expected")
        yield token
