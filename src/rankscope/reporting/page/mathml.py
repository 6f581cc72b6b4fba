"""The part of LaTeX that metric declarations and the documentation use, converted to MathML, which browsers render."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape

_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|[0-9]+(?:\.[0-9]+)?|[{}_^]|:=|[A-Za-z]|\S")
SYMBOLS = {
    "|": "‖", "infty": "∞", "le": "≤", "ge": "≥", "cdot": "·", "times": "×", "to": "→", "in": "∈", "ne": "≠",
    "approx": "≈", "ldots": "…", "dots": "…", "cdots": "⋯", "pm": "±", "mp": "∓", "lVert": "‖", "rVert": "‖",
    "lvert": "|", "rvert": "|", "colon": ":", "{": "{", "}": "}", "langle": "⟨", "rangle": "⟩", "lfloor": "⌊",
    "rfloor": "⌋", "lceil": "⌈", "rceil": "⌉", "odot": "⊙", "otimes": "⊗", "propto": "∝", "leftarrow": "←",
    "mapsto": "↦", "forall": "∀", "exists": "∃", "nabla": "∇", "top": "⊤", "int": "∫", "ll": "≪", "gg": "≫",
}  # fmt: skip
LETTERS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "epsilon": "ϵ", "varepsilon": "ε", "eta": "η", "theta": "θ",
    "kappa": "κ", "lambda": "λ", "mu": "μ", "nu": "ν", "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "ϕ",
    "varphi": "φ", "omega": "ω", "ell": "ℓ", "Sigma": "Σ", "Lambda": "Λ", "Delta": "Δ", "Gamma": "Γ",
}  # fmt: skip
LIMITS = {"sum": "∑", "prod": "∏", "max": "max", "min": "min", "sup": "sup", "inf": "inf", "lim": "lim"}
"""What is below and above them in a displayed formula, and beside them in a line."""
FUNCTIONS = ("log", "exp", "cos", "sin", "tan", "det", "tr", "dim", "tanh", "cosh", "sinh", "arccos", "arctan")
SPACES = {",": 0.17, ":": 0.22, ";": 0.28, "!": -0.17, " ": 0.25, "quad": 1.0, "qquad": 2.0}
SIZES = {"big": 1.2, "Big": 1.8, "bigg": 2.4, "Bigg": 3.0}
DELIMITERS = {"(", ")", "[", "]", "|", "\\|", "\\{", "\\}", "\\langle", "\\rangle", "\\lfloor", "\\rfloor", "."}
WRAPPED = {"mathrm": "<mi mathvariant='normal'>{}</mi>", "text": "<mtext>{}</mtext>"}
WRAPPED["operatorname"] = WRAPPED["mathrm"]
ALPHABETS = {"mathbb": {"E": "𝔼", "R": "ℝ", "P": "ℙ", "N": "ℕ"}, "mathcal": {"J": "𝒥", "N": "𝒩", "O": "𝒪", "L": "ℒ"}}
ACCENTS = {"bar": "¯", "hat": "^", "tilde": "~", "dot": "˙"}
_BINARY = ("+", "-")
_CLOSE = ("|", "/")
"""Set without space around them, unlike a browser would."""
_BEFORE_A_SIGN = ("", "(", "[", "|", ",", "=", ":=", "<", ">", "{", "^", "_", "\\le", "\\ge", "\\approx", "\\cdot")


def mathml(tex: str) -> str:
    r"""``tex`` as a ``<math>`` element; unsupported input is shown verbatim.

    Example:
        >>> mathml(r"x_i^2")
        '<math><msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup></math>'
        >>> mathml(r"\unknown x")
        '<code>\\unknown x</code>'
    """
    try:
        return f"<math>{formula(tex)}</math>"
    except ValueError:
        return f"<code>{escape(tex)}</code>"


def formula(tex: str) -> str:
    r"""The content of a ``<math>`` element.

    Raises:
        ValueError: a part of it is not known; the message names it.

    Example:
        >>> formula(r"\frac12")
        '<mfrac><mn>1</mn><mn>2</mn></mfrac>'
    """
    return "".join(_row(_Reader(tex)))


class _Reader:
    """Token stream with one token of lookahead."""

    def __init__(self, tex: str) -> None:
        self.tex = tex
        self.found = [(match[0], match.start()) for match in _TOKEN.finditer(tex)]
        self.at = 0

    def peek(self) -> str:
        return self.found[self.at][0] if self.at < len(self.found) else ""

    def last(self) -> str:
        return self.found[self.at - 1][0] if self.at else ""

    def next(self) -> str:
        token = self.peek()
        if not token:
            raise ValueError("the formula ends early")
        self.at += 1
        return token

    def digit(self) -> str:
        """The next token; of a number only its first digit, as an argument without braces is one character."""
        token, start = self.found[self.at] if self.at < len(self.found) else ("", 0)
        if token[:1].isdigit() and len(token) > 1:
            self.found[self.at] = (token[1:], start + 1)
            return token[0]
        return self.next()

    def raw(self) -> str:
        """The letters between braces, verbatim."""
        if self.next() != "{":
            raise ValueError("braces were expected")
        start = self.found[self.at - 1][1] + 1
        while (token := self.next()) != "}":
            if token.startswith("\\") or token == "{":
                raise ValueError("letters were expected")
        return self.tex[start : self.found[self.at - 1][1]]


def _row(reader: _Reader, until: str = "") -> Iterator[str]:
    while reader.peek() != until:
        if reader.peek() in ("}", "\\right"):
            raise ValueError(f"{reader.peek()} without its beginning")
        yield _scripted(reader)
    if until:
        reader.next()


def _scripted(reader: _Reader) -> str:
    name = reader.peek().removeprefix("\\")
    base = _atom(reader)
    scripts: dict[str, str] = {}
    primes = ""
    while reader.peek() == "'":
        primes += reader.next().replace("'", "′")
    while reader.peek() in ("_", "^"):
        place = reader.next()
        scripts[place] = _argument(reader).replace(_operator(","), "<mo rspace='0'>,</mo>")
    if primes:
        mark = f"<mo>{primes}</mo>"
        scripts["^"] = f"<mrow>{mark}{scripts['^']}</mrow>" if "^" in scripts else mark
    below, above = ("munder", "mover") if name in LIMITS else ("msub", "msup")
    if len(scripts) == 2:
        both = "munderover" if name in LIMITS else "msubsup"
        base = f"<{both}>{base}{scripts['_']}{scripts['^']}</{both}>"
    elif "_" in scripts:
        base = f"<{below}>{base}{scripts['_']}</{below}>"
    elif scripts:
        base = f"<{above}>{base}{scripts['^']}</{above}>"
    return base + (_space(0.17) if name in FUNCTIONS and reader.peek() not in ("", "(", "[", "}") else "")


def _argument(reader: _Reader) -> str:
    """What follows a command or ``^`` and ``_``: a group, a command, or one character."""
    return f"<mn>{reader.digit()}</mn>" if reader.peek()[:1].isdigit() else _atom(reader)


def _atom(reader: _Reader) -> str:
    before, token = reader.last(), reader.next()
    if token == "{":
        return f"<mrow>{''.join(_row(reader, '}'))}</mrow>"
    if token.startswith("\\"):
        return _command(token[1:], reader)
    if token[0].isdigit():
        return f"<mn>{token}</mn>"
    if token.isalpha():
        return f"<mi>{escape(token)}</mi>"
    if token in _BINARY and before in _BEFORE_A_SIGN:
        return f"<mo form='prefix' lspace='0' rspace='0'>{token.replace('-', '−')}</mo>"
    return _operator(token.replace("-", "−"))


def _operator(sign: str) -> str:
    spacing = " lspace='0' rspace='0'" if sign in _CLOSE else ""
    return f"<mo stretchy='false'{spacing}>{escape(sign)}</mo>"


def _space(width: float) -> str:
    return f"<mspace width='{width:g}em'></mspace>"


def _command(name: str, reader: _Reader) -> str:
    if name in SYMBOLS:
        return _operator(SYMBOLS[name])
    if name in LETTERS:
        return f"<mi>{LETTERS[name]}</mi>"
    if name in LIMITS:
        return f"<mo movablelimits='true' form='prefix' lspace='0' rspace='0.17em'>{LIMITS[name]}</mo>"
    if name in FUNCTIONS:
        return f"<mi>{name}</mi>"
    if name in SPACES:
        return _space(SPACES[name])
    if name in WRAPPED:
        return WRAPPED[name].format(escape(reader.raw()).replace(" ", "\N{NO-BREAK SPACE}"))
    if name in ALPHABETS:
        return f"<mi>{_letter(name, reader)}</mi>"
    if name == "left":
        return _fenced(reader)
    if name.rstrip("lr") in SIZES:
        size = f"{SIZES[name.rstrip('lr')]:g}em"
        large = f"stretchy='true' symmetric='true' lspace='0' rspace='0' minsize='{size}' maxsize='{size}'"
        # In a row of its own, because scripts would shrink it.
        return f"<mrow><mo {large}>{_delimiter(reader)}</mo></mrow>"
    return _construction(name, reader)


def _construction(name: str, reader: _Reader) -> str:
    """A command with arguments that are formulas."""
    if name == "overline":
        return f"<mrow class='over'>{_argument(reader)}</mrow>"
    if name in ACCENTS:
        return f"<mover accent='true'>{_argument(reader)}<mo stretchy='false'>{ACCENTS[name]}</mo></mover>"
    if name == "sqrt":
        return f"<msqrt>{_argument(reader)}</msqrt>"
    if name == "frac":
        return f"<mfrac>{_argument(reader)}{_argument(reader)}</mfrac>"
    if name == "tfrac":
        return f"<mstyle displaystyle='false'><mfrac>{_argument(reader)}{_argument(reader)}</mfrac></mstyle>"
    if name == "binom":
        choice = f"<mfrac linethickness='0'>{_argument(reader)}{_argument(reader)}</mfrac>"
        return f"<mrow><mo stretchy='true'>(</mo>{choice}<mo stretchy='true'>)</mo></mrow>"
    raise ValueError(f"\\{name} is not known")


def _fenced(reader: _Reader) -> str:
    opening = _delimiter(reader)
    inside = "".join(_row(reader, "\\right"))
    closing = _delimiter(reader)
    return f"<mrow><mo stretchy='true'>{opening}</mo>{inside}<mo stretchy='true'>{closing}</mo></mrow>"


def _delimiter(reader: _Reader) -> str:
    token = reader.next()
    if token not in DELIMITERS:
        raise ValueError(f"{token} is not a delimiter")
    return "" if token == "." else SYMBOLS.get(token.removeprefix("\\"), token) if token != "|" else "|"


def _letter(alphabet: str, reader: _Reader) -> str:
    letter = reader.raw() if reader.peek() == "{" else reader.next()
    if letter not in ALPHABETS[alphabet]:
        raise ValueError(f"\\{alphabet}{{{letter}}} is not known")
    return ALPHABETS[alphabet][letter]
