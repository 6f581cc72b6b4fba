"""Wraps third-party parsers of untrusted files: whatever they raise becomes a readable rankscope error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rankscope.errors import RankscopeError


def is_rust_panic(error: BaseException) -> bool:
    """Whether a parser written in Rust gave up: its class derives from BaseException and cannot be imported.

    Example:
        >>> is_rust_panic(KeyboardInterrupt())
        False
    """
    kind = type(error)
    return (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")


@contextmanager
def refusing(kind: type[RankscopeError], what: str, advice: str) -> Iterator[None]:
    """Replace any exception by ``kind``, except rankscope's own errors, out-of-memory and interrupts.

    Args:
        kind: class of the error raised instead.
        what: what happened, the beginning of its message.
        advice: what to do, its end.
    """
    try:
        yield
    except (RankscopeError, MemoryError):
        raise
    except Exception as error:  # the parsers may raise anything
        raise kind(f"{what}: {in_a_line(error)}. {advice}") from error
    except BaseException as error:
        if not is_rust_panic(error):
            raise
        raise kind(f"{what}: {in_a_line(error)}. {advice}") from error


def in_a_line(error: BaseException) -> str:
    r"""The class of an error and the beginning of its message, on one line.

    Example:
        >>> in_a_line(ValueError("two\nlines."))
        'ValueError: two lines'
    """
    words = " ".join(str(error).split())[:300].rstrip(". ")
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
