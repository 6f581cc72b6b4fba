"""Limits on what a server may send, and a switch that forbids requests altogether.

The limits are enforced below the HTTP client, where every byte passes: a status line, headers, the sizes of chunks, the
body of a redirect. A limit in the loop that reads a body would miss all of these, and a timeout of the client starts
anew with each byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from typing import Any

from rankscope.errors import LoadError

SLOWEST = 8 * 1024
"""Bytes per second; a connection that is slower over a whole window is given up."""
OVERHEAD = 2**16
"""Bytes of headers and redirects that an answer may have beyond its content."""


class BadAnswerError(Exception):
    """An answer was longer or slower than allowed; the request may be repeated."""


class Allowance:
    """What one read may take: its requests with their redirects, and those that fail and are repeated.

    Args:
        content: bytes that are wanted; an eighth more is allowed for answers in chunks.
        attempts: how often a request may fail and be repeated; each may bring ``OVERHEAD`` beyond its content.
    """

    def __init__(self, content: int, attempts: int) -> None:
        self._left = content + content // 8 + attempts * OVERHEAD
        self._request_left = self._head_left = 0
        self._window = self._began = 0.0
        self._in_window = 0

    def begin(self, content: int, window: float) -> None:
        """A request starts.

        Until :meth:`head_ends`, at most ``OVERHEAD`` bytes may arrive, however much content is wanted: parsing headers
        and redirects takes a processor a thousand times as long as copying content.

        Args:
            content: bytes that its answer should have at most.
            window: seconds; in each window, counted from the start, at least ``window * SLOWEST`` bytes must arrive, or
                the answer must be complete. So an answer of n bytes ends within about ``window + n / SLOWEST`` seconds.
        """
        self._request_left, self._head_left = content + content // 8 + OVERHEAD, OVERHEAD
        self._window, self._began, self._in_window = window, time.monotonic(), 0

    def head_ends(self) -> None:
        """The headers of the last answer have arrived; what follows is content."""
        self._head_left = self._request_left

    @property
    def is_spent(self) -> bool:
        """Whether no further attempt can bring anything."""
        return self._left <= 0

    def most(self, wanted: int) -> int:
        """Bytes that the next read of the connection may take; the client reads on only if an answer is not complete.

        Raises:
            BadAnswerError: too many have arrived.
        """
        left = min(self._left, self._request_left, self._head_left)
        if left <= 0:
            where = "headers or redirects" if self._head_left < self._request_left else "content"
            raise BadAnswerError(f"an answer that does not end where it should (too many bytes of {where})")
        return min(wanted, left)

    def wait(self, timeout: float | None) -> float:
        """Seconds that the next operation on the connection may take.

        Raises:
            BadAnswerError: the last window brought too little.
        """
        left = self._began + self._window - time.monotonic()
        if left <= 0:
            if self._in_window < SLOWEST * self._window:
                raise BadAnswerError(f"an answer that is too slow ({self._in_window:,} bytes in {self._window:g} s)")
            self._began, self._in_window, left = time.monotonic(), 0, self._window
        return left if timeout is None else min(timeout, left)

    def count(self, size: int) -> None:
        """Note bytes that arrived."""
        self._left -= size
        self._request_left -= size
        self._head_left -= size
        self._in_window += size


_allowed: ContextVar[Allowance | None] = ContextVar("allowed", default=None)
_forbidden: ContextVar[str | None] = ContextVar("forbidden", default=None)


class _Stream:
    """A connection of httpcore whose reads and writes keep to the allowance of the request that uses it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        allowance = _allowed.get()
        if allowance is None:  # a request that somebody else makes with the same client
            return bytes(self._inner.read(max_bytes, timeout))
        piece = bytes(self._inner.read(allowance.most(max_bytes), allowance.wait(timeout)))
        allowance.count(len(piece))
        return piece

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, _time_left(timeout))

    def start_tls(self, ssl_context: Any, server_hostname: str | None = None, timeout: float | None = None) -> _Stream:
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, _time_left(timeout)))

    def close(self) -> None:
        self._inner.close()

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


class _Backend:
    """Opens connections of httpcore that are limited."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def connect_tcp(self, host: str, port: int, timeout: float | None = None, **more: Any) -> _Stream:
        return _Stream(self._inner.connect_tcp(host, port, timeout=_time_left(timeout), **more))

    def connect_unix_socket(self, path: str, timeout: float | None = None, **more: Any) -> _Stream:
        return _Stream(self._inner.connect_unix_socket(path, timeout=_time_left(timeout), **more))

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


def _time_left(timeout: float | None) -> float | None:
    allowance = _allowed.get()
    return timeout if allowance is None else allowance.wait(timeout)


def session() -> Any:
    """The HTTP client of huggingface_hub, with its proxies, certificates and hooks, ready for limits.

    Neither httpx nor httpcore has a public way to put a limit below a client that exists, so the network backend of
    its pools is replaced; requests outside :func:`limited` and :func:`no_requests` go through it unchanged.

    Raises:
        LoadError: huggingface_hub is older than 1.0, whose client has no such pools.
    """
    client = _client()
    if not hasattr(client, "_transport"):
        raise LoadError(
            f"Reading files from a server needs huggingface_hub 1.0 or newer, and {version('huggingface_hub')} is "
            "installed. Load the model with transformers and pass the module, or pass a folder that it was saved to."
        )
    for transport in (client._transport, *client._mounts.values()):
        pool = getattr(transport, "_pool", None)
        if pool is None or isinstance(pool._network_backend, _Backend):
            continue
        pool._network_backend = _Backend(pool._network_backend)
        for connection in pool.connections:  # opened before, so without limits
            if connection.is_idle():
                connection.close()
    return client


def _client() -> Any:
    """The HTTP client of huggingface_hub, which refuses requests inside :func:`no_requests`."""
    from huggingface_hub import get_session

    client: Any = get_session()
    if hasattr(client, "event_hooks"):
        if _refuse_if_forbidden not in client.event_hooks["request"]:
            client.event_hooks["request"].append(_refuse_if_forbidden)
    elif not hasattr(client.send, "refuses"):  # before 1.0, a session of requests
        client.send = _refusing(client.send)
    return client


def _refusing(send: Callable[..., Any]) -> Callable[..., Any]:
    def refuse_or_send(request: Any, **options: Any) -> Any:
        _refuse_if_forbidden(request)
        return send(request, **options)

    refuse_or_send.refuses = True  # type: ignore[attr-defined]
    return refuse_or_send


@contextmanager
def limited(content: int, attempts: int) -> Iterator[Allowance]:
    """Inside this context, requests of this thread share one :class:`Allowance`."""
    allowance = Allowance(content, attempts)
    before = _allowed.set(allowance)
    try:
        yield allowance
    finally:
        _allowed.reset(before)


@contextmanager
def no_requests(name: str) -> Iterator[None]:
    """Inside this context, requests that a library makes in this thread are refused.

    Args:
        name: the model that is being read, for the message.
    """
    _client()
    before = _forbidden.set(name)
    try:
        yield
    finally:
        _forbidden.reset(before)


def _refuse_if_forbidden(request: Any) -> None:
    name = _forbidden.get()
    if name is not None:
        raise LoadError(
            f"{name} names files that are not part of it: reading it would open {str(request.url)!r:.200}. Nothing was "
            "fetched. If it has a pretrained backbone, load it with transformers and save it again (save_pretrained), "
            "so that its config.json has a backbone_config; or pass the module itself."
        )
