"""A switch that forbids requests while an untrusted folder is read: its configuration may name other repositories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from rankscope.errors import LoadError

_forbidden: ContextVar[str | None] = ContextVar("forbidden", default=None)


@contextmanager
def no_requests(name: str) -> Iterator[None]:
    """Inside this context, requests that a library makes in this thread through huggingface_hub are refused.

    Args:
        name: the model that is being read, for the message.
    """
    from huggingface_hub import get_session

    client: Any = get_session()
    if hasattr(client, "event_hooks"):
        if _refuse_if_forbidden not in client.event_hooks["request"]:
            client.event_hooks["request"].append(_refuse_if_forbidden)
    elif not hasattr(client.send, "refuses"):  # before huggingface_hub 1.0, a session of requests
        client.send = _refusing(client.send)
    before = _forbidden.set(name)
    try:
        yield
    finally:
        _forbidden.reset(before)


def _refusing(send: Callable[..., Any]) -> Callable[..., Any]:
    def refuse_or_send(request: Any, **options: Any) -> Any:
        _refuse_if_forbidden(request)
        return send(request, **options)

    refuse_or_send.refuses = True  # type: ignore[attr-defined]
    return refuse_or_send


def _refuse_if_forbidden(request: Any) -> None:
    name = _forbidden.get()
    if name is not None:
        raise LoadError(
            f"{name} names files that are not part of it: reading it would open {str(request.url)!r:.200}. Nothing was "
            "fetched. If it has a pretrained backbone, load it with transformers and save it again (save_pretrained), "
            "so that its config.json has a backbone_config; or pass the module itself."
        )
