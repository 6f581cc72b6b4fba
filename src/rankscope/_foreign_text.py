"""Text that somebody else wrote, such as a name in a file or the message of a library, made safe to show."""

from __future__ import annotations

import re

# Characters that control a terminal, or reorder or hide the text around them. A tab and a line feed are harmless.
_TRICKS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def visible(text: object) -> str:
    r"""``text`` with control and direction-override characters escaped, in the form that JSON has for them.

    Example:
        >>> visible("a\u202eb")
        'a\\u202eb'
    """
    words = str(text)
    if words.isprintable():  # much faster, and nearly always so
        return words
    return _TRICKS.sub(lambda found: f"\\u{ord(found.group()):04x}", words)
