"""Makes untrusted text safe to display: visible control characters, bounded lengths."""

from __future__ import annotations

import re
import unicodedata
from html import escape

from rankscope._foreign_text import visible

__all__ = ["clipped", "paragraphs", "readable", "slug", "split_verdict", "spoken", "visible", "with_powers"]

LONGEST_NAME = 80
LONGEST_WORD = 60
LONGEST_HEADLINE = 110
LONGEST_PARAGRAPH = 420
_SENTENCE = re.compile(r"(?<=\.) (?=[A-Za-z])")
_CODE = re.compile(r"`([^`]+)`")
_POWER = re.compile(r"10\^(-?[0-9]+(?:\.[0-9]+)?)")


def clipped(text: object, longest: int = LONGEST_NAME) -> str:
    """``text`` made visible and short enough for a heading; the middle is elided.

    Example:
        >>> clipped("abcdefghij", 7)
        'abc…hij'
    """
    words = visible(text)
    if len(words) <= longest:
        return words
    head = (longest - 1) // 2
    return f"{words[:head]}…{words[len(words) - (longest - 1 - head) :]}"


def readable(text: object) -> str:
    """``text`` made visible, with overlong words truncated.

    Example:
        >>> len(readable("a " + "x" * 10_000))
        62
    """
    return re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: clipped(word.group(), LONGEST_WORD), visible(text))


def slug(text: object) -> str:
    """``text`` as part of an element's id.

    Example:
        >>> slug("Relative residual / norm")
        'relative-residual-norm'
    """
    plain = unicodedata.normalize("NFKD", str(text)).encode("ascii", "ignore").decode("ascii").lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:60] or "x"


def spoken(metric: str) -> str:
    """The name of a metric as words."""
    return visible(metric).replace("_", " ")


def split_verdict(sentence: str) -> tuple[str, str]:
    """Split a verdict into its first sentence, which is the headline, and the rest.

    Example:
        >>> split_verdict("No collapse. Lowest relative residual: 0.87, after block 2 of 3.")
        ('No collapse', 'Lowest relative residual: 0.87, after block 2 of 3.')
        >>> split_verdict("Short.")
        ('Short', '')
    """
    head, _, rest = sentence.replace(".\n", ". ", 1).partition(". ")
    return (sentence, "") if len(head) > LONGEST_HEADLINE else (head.removesuffix("."), rest.strip())


def paragraphs(text: str) -> list[str]:
    r"""The text as one paragraph, as its lines if it has several, or as a list of its sentences if it is long.

    Example:
        >>> paragraphs("One. Two.")
        ['One. Two.']
        >>> paragraphs("One. Two.\nThree.")
        ['One. Two.', 'Three.']
    """
    if "\n" in text:
        return [line for line in text.split("\n") if line]
    if len(text) <= LONGEST_PARAGRAPH:
        return [text] if text else []
    return [_started(sentence) for sentence in _SENTENCE.split(text)]


def _started(sentence: str) -> str:
    """Capitalise the first letter, unless the text starts with a name."""
    return sentence if "_" in sentence.partition(" ")[0] else sentence[:1].upper() + sentence[1:]


def with_powers(text: str) -> str:
    """Escaped ``text`` with powers of ten as superscripts and code between backticks; safe markup.

    Example:
        >>> with_powers("<10^-14.4>, `x = f(x)`")
        '&lt;10<sup>−14.4</sup>&gt;, <code>x = f(x)</code>'
    """
    powers = _POWER.sub(lambda found: f"10<sup>{found.group(1).replace('-', '−')}</sup>", escape(text))
    return _CODE.sub(r"<code>\1</code>", powers)
