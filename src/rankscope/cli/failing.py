"""What is no fault of a command, told in words: no memory, no room, a reader that went away, too few letters."""

from __future__ import annotations

import errno
import io
import os
import sys

EXIT_NO_READER = 141
"""What a shell counts for a process that SIGPIPE ended."""
ADVICE = (
    "Fewer --sequences or --tokens, a smaller --batch, --dtype bfloat16, or --offload for a model that lies on disk "
    "need less."
)
SIGNS = ("can't allocate memory", "cannot allocate memory", "failed to map segment", "out of memory", "std::bad_alloc")
"""What torch, the loader of shared libraries and the C++ runtime say where Python says MemoryError."""


def told(error: BaseException) -> str | None:
    """The sentence for an error of the machine; None for one that is a defect."""
    seen: BaseException | None = error
    while seen is not None:
        if _is_out_of_memory(seen):
            said = " ".join(str(seen).split())
            return f"There was not enough memory ({type(seen).__name__}{f': {said[:200]}' if said else ''}). {ADVICE}"
        seen = seen.__cause__ or seen.__context__
    if isinstance(error, RuntimeError) and "home directory" in str(error):
        return "A path begins with ~, and there is no home of that name. Write the path in full."
    if isinstance(error, OSError) and error.strerror:
        place = f": {error.filename!s}" if error.filename is not None else ""
        return f"The system answered: {error.strerror}{place}. Results already saved are whole; --debug shows where."
    return None


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    kinds = (RuntimeError, ImportError, OSError)
    return isinstance(error, kinds) and any(sign in str(error).lower() for sign in SIGNS)


def tolerate_every_letter() -> None:
    """Let output write what its encoding lacks as an escape, not end in an error; without a stream it goes nowhere."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed before the start
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - for the life of the process
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Write what is still to be written, while an error can still be told.

    Raises:
        OSError: it could not be written; the interpreter will not try again.
    """
    try:
        sys.stdout.flush()
    except OSError:
        drop_output()
        raise


def drop_output(stream: int = 1) -> None:
    """Send whatever is still to be written nowhere: of standard output (1) or of errors (2)."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, stream)
    finally:
        os.close(nowhere)
