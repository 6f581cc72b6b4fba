"""Faults of a network and of servers, for :mod:`tests.hub_server`; each answers one request of a range wrongly."""

from __future__ import annotations

import time
from pathlib import Path

from tests.hub_server import Fault, Handler

STALL = 0.9
"""Longer than the timeout that the tests set."""


def drops_at_once(handler: Handler, path: Path, first: int, last: int) -> bool:
    handler.hang_up()
    return True


def drops_half_way(handler: Handler, path: Path, first: int, last: int) -> bool:
    handler.head(path, first, last)
    handler.body(path, first, (last - first + 1) // 2)
    handler.hang_up()
    return True


def ends_early(handler: Handler, path: Path, first: int, last: int) -> bool:
    handler.head(path, first, last)
    handler.body(path, first, (last - first + 1) // 3)
    handler.close_connection = True
    return True


def announces_less(handler: Handler, path: Path, first: int, last: int) -> bool:
    """A body shorter than its own Content-Range."""
    handler.head(path, first, last, length=(last - first + 1) // 2)
    handler.body(path, first, (last - first + 1) // 2)
    return True


def answers_less(handler: Handler, path: Path, first: int, last: int) -> bool:
    """A shorter range than requested, which HTTP allows."""
    last = first + (last - first) // 2
    handler.head(path, first, last)
    handler.body(path, first, last - first + 1)
    return True


def sends_more(handler: Handler, path: Path, first: int, last: int) -> bool:
    handler.head(path, first, last, length=last - first + 101)
    handler.body(path, first, last - first + 1)
    handler.wfile.write(bytes(100))
    return True


def another_range(handler: Handler, path: Path, first: int, last: int) -> bool:
    """Four bytes later, or earlier at the end of the file, with the bytes that are there."""
    shift = 4 if last + 4 < path.stat().st_size else -4
    handler.head(path, first + shift, last + shift)
    handler.body(path, first + shift, last - first + 1)
    return True


def no_range(handler: Handler, path: Path, first: int, last: int) -> bool:
    handler.send_response(206)
    handler.send_header("Content-Length", str(last - first + 1))
    handler.end_headers()
    handler.body(path, first, last - first + 1)
    return True


def encodes(handler: Handler, path: Path, first: int, last: int) -> bool:
    handler.head(path, first, last, Content_Encoding="gzip")
    handler.body(path, first, last - first + 1)
    return True


def stalls(handler: Handler, path: Path, first: int, last: int) -> bool:
    handler.head(path, first, last)
    handler.body(path, first, 5)
    handler.wfile.flush()
    time.sleep(STALL)
    handler.hang_up()
    return True


def drips(handler: Handler, path: Path, first: int, last: int) -> bool:
    """A few bytes at a time, never long enough apart for a timeout between two of them."""
    handler.head(path, first, last)
    for shift in range(8):
        handler.body(path, first + shift, 1)
        handler.wfile.flush()
        time.sleep(STALL / 8)
    handler.hang_up()
    return True


def not_http(handler: Handler, path: Path, first: int, last: int) -> bool:
    handler.wfile.write(b"I am a teapot\r\n\r\n")
    handler.close_connection = True
    return True


def too_many(handler: Handler, path: Path, first: int, last: int) -> bool:
    handler.refuse(429, Retry_After="0")
    return True


def unavailable(handler: Handler, path: Path, first: int, last: int) -> bool:
    handler.refuse(503)
    return True


def sends_everything(handler: Handler, path: Path, first: int, last: int) -> bool:
    size = path.stat().st_size
    handler.send_response(200)
    handler.send_header("Content-Length", str(size))
    handler.end_headers()
    handler.body(path, 0, size)
    return True


def grows(handler: Handler, path: Path, first: int, last: int) -> bool:
    handler.head(path, first, last, total=path.stat().st_size + 8)
    handler.body(path, first, last - first + 1)
    return True


def changes(handler: Handler, path: Path, first: int, last: int) -> bool:
    """Other content of the same size from here on, for an ordinary server; a commit of the hub does not change."""
    handler.served.etag = "two"
    handler.head(path, first, last)
    handler.body(path, first, last - first + 1)
    return True


def forbids(handler: Handler, path: Path, first: int, last: int) -> bool:
    handler.refuse(403)
    return True


def vanishes(handler: Handler, path: Path, first: int, last: int) -> bool:
    handler.refuse(404)
    return True


PASSING: tuple[Fault, ...] = (
    drops_at_once,
    drops_half_way,
    ends_early,
    stalls,
    drips,
    not_http,
    too_many,
    unavailable,
)
"""After these the client asks again, and the right bits must arrive."""

FATAL: dict[Fault, str] = {
    announces_less: "bytes came instead of",
    sends_more: "bytes came instead of",
    answers_less: "does not send the bytes",
    another_range: "does not send the bytes",
    no_range: "does not send the bytes",
    sends_everything: "does not send the bytes",
    encodes: "could not be read",
    grows: "changed while it was being read",
    forbids: "could not be read.*403",
    vanishes: "could not be read.*404",
}
"""These must end in an error that says so."""
