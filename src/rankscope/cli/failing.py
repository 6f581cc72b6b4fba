"""Errors of the machine: out of memory, disk full, a closed pipe, an output encoding that lacks a character."""

from __future__ import annotations

import errno
import io
import os
import sys

EXIT_NO_READER = 141
"""The exit code a shell reports for a process that SIGPIPE ended."""
ADVICE = (
    "To use less, pass fewer --sequences or --tokens, a smaller --batch, --dtype bfloat16, or --offload for a model in "
    "a local folder."
)
SIGNS = ("can't allocate memory", "cannot allocate memory", "failed to map segment", "out of memory", "std::bad_alloc")
"""Parts of the messages with which torch, the dynamic loader and the C++ runtime report that memory ran out."""


def message_of(error: BaseException) -> str | None:
    """The message for an error of the machine; None for a bug."""
    seen: BaseException | None = error
    while seen is not None:
        if _is_out_of_memory(seen):
            said = " ".join(str(seen).split())
            return f"There was not enough memory ({type(seen).__name__}{f': {said[:200]}' if said else ''}). {ADVICE}"
        seen = seen.__cause__ or seen.__context__
    if isinstance(error, RuntimeError) and "home directory" in str(error):
        return "A path begins with ~, but there is no such home directory. Write the path in full."
    if isinstance(error, OSError) and error.strerror:
        place = f": {error.filename!s}" if error.filename is not None else ""
        return f"The system reported: {error.strerror}{place}. Results saved before are complete; --debug shows where."
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    kinds = (RuntimeError, ImportError, OSError)
    return isinstance(error, kinds) and any(sign in str(error).lower() for sign in SIGNS)


def escape_unprintable() -> None:
    """Escape characters that the output encoding lacks, instead of failing; discard the output of a closed stream."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed before the start
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the life of the process
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Flush stdout while an error can still be reported.

    Raises:
        OSError: it could not be written; the interpreter will not try again.
    """
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()
        raise


def drop_output(stream: int = 1) -> None:
    """Discard everything still to be written to standard output (1) or standard error (2)."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream)
    finally:
        os.close(nowhere)
