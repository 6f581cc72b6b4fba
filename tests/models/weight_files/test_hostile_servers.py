"""Servers that are slow, never end, lie or change their mind: right bits or a sentence, in bounded time and bytes.

Each case is one behaviour at one kind of request that rankscope makes. The server speaks TCP, not HTTP, so that it can
misbehave from the first byte of an answer.
"""

from __future__ import annotations

import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load, save

from rankscope.errors import RankscopeError
from rankscope.models.loading import wire
from rankscope.models.loading.config import read_config_json
from rankscope.models.weight_files import http, snapshot
from rankscope.models.weight_files.folders import ModelFolder, model_folder, stored_tensors
from rankscope.models.weight_files.tensors import planned_reads

COMMIT = "c0ffee" + "0" * 34
BUDGET = 100_000
LONGEST = 20.0
STEP = 0.06
"""Seconds between the bytes of a server that drips: shorter than any timeout."""
WEIGHTS = {f"w{number}": torch.arange(2000.0) + number for number in range(4)}
FILES = {"config.json": b'{"model_type": "bert"}', "model.safetensors": save(WEIGHTS)}
SHA256 = hashlib.sha256(FILES["model.safetensors"]).hexdigest()
ALTERED = FILES["model.safetensors"][:-3000] + bytes(3000)


@dataclass
class Request:
    """One request, and the connection to answer it on.

    Attributes:
        kind: ``listing``, ``resolve`` (the hub's redirect), ``cdn`` (where it leads), ``probe`` or ``range``.
        name: of the file.
        first: first byte of the range.
        last: last byte of it.
        count: how many requests of this kind for this file came before.
        step: seconds between two bytes of an answer that drips.
    """

    connection: socket.socket
    kind: str
    name: str
    first: int
    last: int
    address: str
    count: int
    step: float

    def send(self, *parts: bytes | str) -> None:
        self.connection.sendall(b"".join(part if isinstance(part, bytes) else part.encode() for part in parts))

    @property
    def content(self) -> bytes:
        return listing() if self.kind == "listing" else FILES[self.name][self.first : self.last + 1]

    @property
    def first_line(self) -> str:
        return f"HTTP/1.1 {'200 OK' if self.kind == 'listing' else '206 Partial Content'}\r\n"

    def head(self, *, length: int | None = None, chunked: bool = False, without: str = "", **other: str) -> str:
        """Status and headers of an honest answer; those in ``without`` are left out."""
        size = len(FILES.get(self.name, b""))
        lines = {
            "Content-Length": str(len(self.content) if length is None else length),
            "Content-Range": f"bytes {self.first}-{self.last}/{size}",
            "ETag": '"one"',
        }
        if self.kind == "listing":
            del lines["Content-Range"], lines["ETag"]
        if chunked:
            del lines["Content-Length"]
            lines["Transfer-Encoding"] = "chunked"
        lines |= {name.replace("_", "-"): value for name, value in other.items()}
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if name not in without.split())
        return f"{self.first_line}{text}\r\n"

    def honest(self, content: bytes | None = None, **how: str) -> None:
        if self.kind == "resolve" and self.name.endswith("safetensors"):
            moved = {"Location": f"{self.address}/cdn/{self.name}", "X_Linked_Etag": f'"{SHA256}"', **how}
            lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in moved.items() if value)
            self.send("HTTP/1.1 302 Found\r\nContent-Length: 0\r\n", lines, "\r\n")
        elif self.kind != "listing" and self.name not in FILES:
            self.status(404)
        else:
            self.send(self.head(**how), self.content if content is None else content)

    def status(self, code: int, **headers: str) -> None:
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        self.send(f"HTTP/1.1 {code} Words\r\nContent-Length: 0\r\n{lines}\r\n")

    def drip(self, text: bytes) -> None:
        for position in range(len(text)):
            self.send(text[position : position + 1])
            time.sleep(self.step)

    def forever(self, piece: bytes) -> None:
        while True:
            self.send(piece)


def listing(**changes: object) -> bytes:
    """The hub's answer about the model."""
    files: list[object] = []
    for name, content in FILES.items():
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry: dict[str, object] = {"rfilename": name, "size": len(content), "blobId": git}
        if name.endswith("safetensors"):
            entry["lfs"] = {"sha256": SHA256, "size": len(content), "pointerSize": 134}
        files.append(entry)
    return json.dumps({"_id": "1", "id": "owner/name", "sha": COMMIT, "siblings": files, **changes}).encode()


Behaviour = Callable[[Request], object]
CHUNK = b"10000\r\n" + b"x" * 65536 + b"\r\n"
SLOW: dict[str, Behaviour] = {
    "says nothing": lambda r: time.sleep(60),
    "drips the status": lambda r: r.drip(b"HTTP/1.1 200 " + b"O" * 2000),
    "drips a header": lambda r: (r.send(r.first_line, "X: "), r.drip(b"y" * 2000)),
    "drips headers": lambda r: (r.send(r.first_line), r.drip(b"X: y\r\n" * 2000)),
    "drips the body": lambda r: (r.send(r.head()), r.drip(r.content)),
    "drips a chunk": lambda r: (r.send(r.head(chunked=True), "1000\r\n"), r.drip(b"x" * 2000)),
    "drips the size of a chunk": lambda r: (r.send(r.head(chunked=True)), r.drip(b"0" * 2000)),
    "drips a trailer": lambda r: (r.send(r.head(chunked=True), "0\r\n"), r.drip(b"T: x\r\n" * 999)),
    "drips the second half": lambda r: (r.send(r.head(), r.content[: len(r.content) // 2]), r.drip(b"x" * 2000)),
    "stops half way": lambda r: (r.send(r.head(), r.content[: len(r.content) // 2]), time.sleep(60)),
    "drips a redirect": lambda r: (
        r.send("HTTP/1.1 302 F\r\nLocation: /x\r\nContent-Length: 999\r\n\r\n"),
        r.drip(b"x" * 999),
    ),
    "drips an error": lambda r: (r.send("HTTP/1.1 503 S\r\nContent-Length: 999\r\n\r\n"), r.drip(b"x" * 999)),
}
ENDLESS: dict[str, Behaviour] = {
    "one header without end": lambda r: (r.send(r.first_line, "X: "), r.forever(b"y" * 4096)),
    "headers without end": lambda r: (r.send(r.first_line), r.forever(b"X: y\r\n" * 500)),
    "chunks without end": lambda r: (r.send(r.head(chunked=True)), r.forever(CHUNK)),
    "a body without length": lambda r: (r.send(r.head(without="Content-Length")), r.forever(b"x" * 65536)),
    "more than announced": lambda r: (r.send(r.head(), r.content), r.forever(b"x" * 65536)),
    "a length of a terabyte": lambda r: (r.send(r.head(length=2**40)), r.forever(b"x" * 65536)),
    "a redirect without end": lambda r: (r.send("HTTP/1.1 302 F\r\nLocation: /x\r\n\r\n"), r.forever(b"x" * 65536)),
    "an error without end": lambda r: (r.send("HTTP/1.1 500 S\r\n\r\n"), r.forever(b"x" * 65536)),
    "trailers without end": lambda r: (r.send(r.head(chunked=True), "0\r\n"), r.forever(b"T: x\r\n" * 500)),
    "interim answers without end": lambda r: r.forever(b"HTTP/1.1 103 Early Hints\r\nX: y\r\n\r\n" * 50),
}
LYING: dict[str, Behaviour] = {
    "another range": lambda r: r.honest(
        Content_Range=f"bytes {r.first + 8}-{r.last + 8}/{len(FILES.get(r.name, b''))}"
    ),
    "a range that is not one": lambda r: r.honest(Content_Range="bytes x-y/z"),
    "an endless range": lambda r: r.honest(Content_Range=f"bytes {r.first}-{r.last}/{'9' * 5000}"),
    "a length that is not one": lambda r: r.send(r.head(without="Content-Length", Content_length="many"), r.content),
    "an encoding": lambda r: r.honest(Content_Encoding="gzip"),
    "no content": lambda r: r.status(204),
    "no such range": lambda r: r.status(416),
    "a loop": lambda r: r.status(302, Location="/loop"),
    "a file of this machine": lambda r: r.status(302, Location="file:///etc/passwd"),
    "nobody there": lambda r: r.status(302, Location="http://127.0.0.1:9/x"),
    "wait a minute": lambda r: r.status(503, Retry_After="58"),
    "wait forever": lambda r: r.status(429, Retry_After="9" * 400),
    "wait nan": lambda r: r.status(429, Retry_After="nan"),
    "wait for a date": lambda r: r.status(503, Retry_After="Fri, 31 Dec 9999 23:59:59 GMT"),
    "a limit of rates": lambda r: r.status(429, RateLimit=f'"api";r=0;t={"9" * 300}'),
    "an odd status": lambda r: r.status(799),
    "not HTTP": lambda r: r.send("I am a teapot\r\n\r\n"),
    "zeros": lambda r: r.send(bytes(1000)),
    "hangs up": lambda r: None,
    "hangs up half way": lambda r: r.send(r.head(), r.content[: len(r.content) // 2]),
    "hangs up in long headers": lambda r: r.send(r.first_line, "X: y\r\n" * 10_000),
    "one byte at a time": lambda r: r.send(
        r.head(length=1, Content_Range=f"bytes {r.first}-{r.first}/{len(FILES.get(r.name, b''))}"), r.content[:1]
    ),
}
LISTS: dict[str, Behaviour] = {
    "brackets": lambda r: answer(r, b"[" * 100_000),
    "not JSON": lambda r: answer(r, b"<html>"),
    "a number": lambda r: answer(r, b"1"),
    "no files": lambda r: answer(r, b'{"sha": "c0ffee"}'),
    "a commit that climbs": lambda r: answer(r, listing(sha="../../../etc")),
    "a commit that is a number": lambda r: answer(r, listing(sha=5)),
    "files that are words": lambda r: answer(r, listing(siblings=["config.json"])),
    "a size below zero": lambda r: answer(r, listing().replace(b'"size": 22', b'"size": -1')),
    "a size without end": lambda r: answer(r, listing().replace(b'"size": 22', b'"size": ' + b"9" * 60)),
    "a hash that climbs": lambda r: answer(r, listing().replace(SHA256.encode(), b"../../../../x")),
    "another hash": lambda r: answer(r, listing().replace(SHA256.encode(), b"0" * 64)),
    "endless JSON": lambda r: (r.send(r.head(chunked=True), '2\r\n{"\r\n'), r.forever(CHUNK)),
}


def answer(request: Request, body: bytes) -> None:
    request.send(request.head(length=len(body)), body)


def altered(request: Request) -> bytes:
    return ALTERED[request.first : request.last + 1]


CHANGING: dict[str, tuple[str, Behaviour]] = {
    "drops the ETag": ("range", lambda r: r.honest(altered(r), without="ETag")),
    "swaps it for a date": (
        "range",
        lambda r: r.honest(altered(r), without="ETag", Last_Modified="Tue, 17 Nov 2026 00:00:00 GMT"),
    ),
    "changes the ETag": ("range", lambda r: r.honest(altered(r), ETag='"two"')),
    "drops the hash": ("resolve", lambda r: r.honest(X_Linked_Etag="")),
    "changes the hash": ("resolve", lambda r: r.honest(X_Linked_Etag='"' + "0" * 64 + '"')),
    "drops it without a redirect": ("resolve", lambda r: r.send(r.head(), altered(r))),
}
"""What a server answers instead of the truth, after it has answered the first two requests truly."""


@dataclass
class Server:
    """A server that misbehaves at one kind of request.

    Attributes:
        kind: the request; see :class:`Request`.
        name: the file at whose requests it misbehaves.
        after: honest answers to such requests before.
    """

    behaviour: Behaviour
    kind: str
    name: str = ""
    after: int = 0
    address: str = ""
    step: float = STEP
    counts: dict[tuple[str, str], int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while head := self._head(connection):
                request = self._request(connection, head)
                meant = request.kind == self.kind and self.name in ("", request.name) and request.count >= self.after
                (self.behaviour if meant else Request.honest)(request)  # type: ignore[operator]
                if meant:
                    return

    def _head(self, connection: socket.socket) -> str:
        found = b""
        while b"\r\n\r\n" not in found:
            piece = connection.recv(65536)
            if not piece:
                return ""
            found += piece
        return found.decode()

    def _request(self, connection: socket.socket, head: str) -> Request:
        path = head.split()[1].split("?")[0]
        name = path.rsplit("/", 1)[-1]
        asked = re.search(r"(?i)range: bytes=(\d+)-(\d+)", head)
        first, last = (int(asked[1]), int(asked[2])) if asked else (0, 0)
        last = min(last, max(len(FILES.get(name, b"")) - 1, 0))
        kind = "listing" if "/api/" in path else "resolve" if "/resolve/" in path else "cdn" if "/cdn/" in path else ""
        kind = kind or ("probe" if asked and asked[1] == asked[2] == "0" else "range")
        with self.lock:
            count = self.counts.get((kind, name), 0)
            self.counts[kind, name] = count + 1
        return Request(connection, kind, name, first, last, self.address, count, self.step)


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    listener = socket.create_server(("127.0.0.1", 0))
    server.address = f"http://127.0.0.1:{listener.getsockname()[1]}"

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=server.serve, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield server
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def by_range(spec: str, folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a model that is read by range, and its configuration."""
    place: ModelFolder = model_folder(spec, byte_budget=BUDGET)
    with place.copied(("config.json",)) as small:
        assert read_config_json(small / "config.json") == json.loads(FILES["config.json"])
    stored = stored_tensors(place)
    found = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in stored.items()}
    for read in planned_reads((stored[name], found[name]) for name in stored):
        read()
    return found


def downloaded(spec: str, folder: Path) -> dict[str, torch.Tensor]:
    """The same of a model that is downloaded into the hub's cache."""
    place = snapshot.hub_snapshot("owner/name", None, online=True, weights=True)
    assert (place / "config.json").read_bytes() == FILES["config.json"]
    return load((place / "model.safetensors").read_bytes())


def cases() -> Iterator[Any]:
    everywhere = {**SLOW, **ENDLESS, **LYING}
    places = [("hub", "listing", ""), ("hub", "resolve", "config.json"), ("hub", "resolve", "model.safetensors")]
    places += [
        ("hub", "cdn", "model.safetensors"),
        ("url", "probe", "config.json"),
        ("url", "range", "model.safetensors"),
    ]
    places += [("download", "listing", ""), ("download", "cdn", "model.safetensors")]
    for number, (what, behaviour) in enumerate(everywhere.items()):
        for turn, (flow, kind, name) in enumerate(places):
            # Two places each in an ordinary run, all of them in a slow one.
            marks = [] if (number - turn) % 4 == 0 else [pytest.mark.slow]
            yield pytest.param(flow, Server(behaviour, kind, name), id=f"{what}-{flow}-{kind}-{name}", marks=marks)
    for what, behaviour in LISTS.items():
        yield pytest.param("hub", Server(behaviour, "listing"), id=f"{what}-listing")
    for what, (kind, behaviour) in CHANGING.items():
        for flow, after in (("url", 1),) if kind == "range" else (("hub", 1), ("download", 0)):
            yield pytest.param(flow, Server(behaviour, kind, "model.safetensors", after), id=f"{what}-{flow}")


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One honest model by each way, so that no case is charged for the imports of a client."""
    for flow in ("hub", "url", "download"):
        with pytest.MonkeyPatch.context() as patched:
            ended(flow, Server(Request.honest, ""), tmp_path_factory.mktemp(flow), patched)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("flow", "server"), list(cases()))
def test_right_bits_or_a_sentence(flow: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    monkeypatch.setattr(http, "PATIENCE", 0.5)
    began = time.process_time()
    # The limits here are a thirtieth of a user's. What a busy machine adds is not the client's doing: its own work is
    # processor time.
    assert ended(flow, server, tmp_path, monkeypatch) < LONGEST
    assert time.process_time() - began < LONGEST / 8


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(("flow", "server"), [case for case in cases() if not case.marks])
def test_the_same_with_the_limits_of_a_user(
    flow: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.step, server.counts = 3.0, {}
    assert ended(flow, server, tmp_path, monkeypatch) < LONGEST


def queued() -> float:
    """Seconds that this thread could have run while the processors were busy with others; Linux only, else 0."""
    facts = Path("/proc/thread-self/schedstat")
    return int(facts.read_text().split()[1]) / 1e9 if facts.exists() else 0.0


def ended(flow: str, server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds until a model was read rightly or refused within the budget, less those that others had the machine."""
    received = 0
    count = wire.Allowance.count

    def counted(self: wire.Allowance, size: int) -> None:
        nonlocal received
        received += size
        count(self, size)

    monkeypatch.setattr(wire.Allowance, "count", counted)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with serving(server):
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        spec = f"{server.address}/plain" if flow == "url" else "hub:owner/name"
        said, began, held_up = "", time.monotonic(), queued()
        try:
            found = (downloaded if flow == "download" else by_range)(spec, tmp_path)
        except RankscopeError as error:
            said = str(error)
            assert len(said) > 40
            assert not list(tmp_path.glob("**/model.safetensors"))
        else:
            assert found.keys() == WEIGHTS.keys()
            assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS), "altered bytes"
    seconds = time.monotonic() - began - (queued() - held_up)
    # Each of at most eight attempts may meet headers that are too long before it is given up.
    budget = http.LARGEST_LISTING if (flow, server.kind) == ("download", "listing") else BUDGET
    assert received <= 1.2 * budget + 8 * wire.OVERHEAD
    if server.behaviour in [behaviour for _, behaviour in CHANGING.values()]:
        assert said, "an answer without the tag, or with another one, was accepted"
    return seconds
