"""Whom the page answers: only requests that name this machine.

A page of another site can make its own name point to 127.0.0.1 (DNS rebinding) and then send requests here from the
visitor's browser. The browser still tells which name it was asked for (``Host``) and which page asked (``Origin``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ASGI = Callable[..., Awaitable[None]]


class OnlyThisMachine:
    """Refuses requests for other names than these, and requests from pages of other origins.

    Args:
        app: the ASGI application that answers the rest.
        names: accepted besides the names of the loopback and the address on which a request arrived.
    """

    def __init__(self, app: _ASGI, names: Iterable[str] = ()) -> None:
        self._app = app
        self._names = {name.lower().strip("[]") for name in (*LOOPBACK, *names)}

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        """Answer, or refuse with 403."""
        if scope["type"] in ("http", "websocket") and not self._accepts(scope):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            said = b"This page answers only under the names of this machine. See rankscope play --allow-host.\n"
            headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(said)).encode())]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": said})
            return
        await self._app(scope, receive, send)

    def _accepts(self, scope: Mapping[str, Any]) -> bool:
        given = [(name.lower(), value.decode("latin-1").lower()) for name, value in scope["headers"]]
        hosts = [value for name, value in given if name == b"host"]
        origins = [value for name, value in given if name == b"origin"]
        if len(hosts) != 1 or len(origins) > 1:
            return False
        try:
            asked = urlsplit(f"//{hosts[0]}").hostname
            from_page = urlsplit(origins[0]).netloc if origins else hosts[0]
        except ValueError:
            return False
        # Listening on all addresses, a request may name any of them; a number cannot be made to point elsewhere.
        arrived_on = (scope.get("server") or ("",))[0]
        return asked in {*self._names, arrived_on} and from_page == hosts[0]
