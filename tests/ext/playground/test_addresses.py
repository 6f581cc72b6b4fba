"""Whom the page answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from rankscope.ext.playground.addresses import OnlyThisMachine

EVIL = "evil.example"
REQUESTS = [
    ({"host": "127.0.0.1:7860"}, True),
    ({"host": "localhost:7860"}, True),
    ({"host": "LOCALHOST"}, True),
    ({"host": "[::1]:7860"}, True),
    ({"host": "10.0.0.5:7860"}, True),  # the address on which the request arrived
    ({"host": "lab.example:7860"}, True),  # named by the user
    ({"host": "127.0.0.1:7860", "origin": "http://127.0.0.1:7860"}, True),
    ({"host": f"{EVIL}:7860"}, False),
    ({"host": f"{EVIL}:7860", "origin": f"http://{EVIL}:7860"}, False),
    ({"host": f"127.0.0.1.{EVIL}"}, False),
    ({"host": f"127.0.0.1@{EVIL}"}, False),
    ({"host": "10.0.0.6"}, False),
    ({"host": ""}, False),
    ({}, False),
    ({"host": "[::1"}, False),
    ({"host": "127.0.0.1:7860", "origin": f"http://{EVIL}"}, False),
    ({"host": "127.0.0.1:7860", "origin": "http://127.0.0.1:3000"}, False),
    ({"host": "127.0.0.1:7860", "origin": "null"}, False),
    ({"host": "127.0.0.1:7860", "origin": "http://[::1"}, False),
]


@pytest.mark.parametrize("kind", ["http", "websocket"])
def test_only_names_of_this_machine_are_answered(kind: str) -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "answered"})

    guarded = OnlyThisMachine(answer, names=("lab.example",))
    for headers, accepted in REQUESTS:
        sent: list[Any] = []

        async def send(message: Any, sent: list[Any] = sent) -> None:
            sent.append(message)

        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": kind, "headers": raw, "server": ("10.0.0.5", 7860)}
        asyncio.run(guarded(scope, None, send))
        assert (sent[0]["type"] == "answered") == accepted, headers
        assert accepted or sent[0].get("status") == 403 or kind == "websocket"
