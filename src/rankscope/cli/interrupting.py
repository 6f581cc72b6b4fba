"""Interrupted commands: say so, and exit with the code a shell expects."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import typer

from rankscope.cli.streams import remarks_console

EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_TERMINATED = 128 + signal.SIGTERM


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM; handled like an interrupt."""


@contextmanager
def ending_on_request() -> Iterator[None]:
    """Treat SIGTERM, which batch systems send before they kill, as an interrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


@contextmanager
def telling(so_far: Callable[[], str]) -> Iterator[None]:
    """Say what is saved so far if the command is interrupted."""
    try:
        yield
    except KeyboardInterrupt as stopped:
        remarks_console().print(f"Interrupted. {so_far()}", markup=False)
        raise typer.Exit(exit_code(stopped)) from None


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it was raised from or while handling."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def exit_code(stopped: BaseException | None) -> int:
    """128 plus the number of the signal that caused an interrupt."""
    terminated = any(isinstance(one, Terminated) for one in _behind(stopped))
    return EXIT_TERMINATED if terminated else EXIT_INTERRUPTED


def interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """The interrupt during whose handling an error was raised, as by a context manager it hit half-way; or None."""
    return next((one for one in _behind(error) if isinstance(one, KeyboardInterrupt)), None)


def is_untold(left: SystemExit) -> bool:
    """Whether a command was interrupted outside :func:`telling`, so that no message was printed yet."""
    context = left.__context__
    return isinstance(context, typer.Exit) and isinstance(context.__cause__, KeyboardInterrupt)
