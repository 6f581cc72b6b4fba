"""A hub on localhost: the endpoints that huggingface_hub uses for models, with faults on request.

It answers ``/api/models/NAME[/revision/REV]?blobs=true`` and ``/NAME/resolve/REV/FILE`` (a redirect to ``/cdn/...``, as
the hub does for large files), and ``/plain/FILE`` as an ordinary web server.
"""

from __future__ import annotations

import hashlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34

Fault = Callable[["Handler", Path, int, int], bool]
"""Called with the file and the requested range; True if it has answered the request itself."""


@dataclass
class Served:
    """What the server has, does and has seen.

    Attributes:
        folder: the model, whatever its owner is called.
        others: further models by their owner, as in ``OWNER/tiny``.
        token: if not None, the token without which nothing is shown.
        faults: consumed one per request of a range, in order; None for an honest answer.
        bandwidth: bytes per second over all connections; None for no limit.
        latency: seconds before each answer.
        ranges: (file, first byte, number of bytes) of each request of a range.
    """

    folder: Path
    token: str | None = None
    status: int | None = None
    faults: list[Fault | None] = field(default_factory=list)
    bandwidth: float | None = None
    latency: float = 0.0
    etag: str = "one"
    address: str = ""
    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    due: float = 0.0
    hashes: dict[str, str] = field(default_factory=dict)
    others: dict[str, Path] = field(default_factory=dict)

    def of(self, words: list[str]) -> Path:
        """The model that a path with an owner means."""
        return next((self.others[word] for word in words if word in self.others), self.folder)

    def hash_of(self, path: Path) -> str:
        """Its hash, or the one that ``hashes`` states for its name."""
        with self.lock:
            if path.name in self.hashes:
                return self.hashes[path.name]
            if str(path) not in self.hashes:
                digest = hashlib.sha256()
                with path.open("rb") as file:
                    while piece := file.read(1 << 20):
                        digest.update(piece)
                self.hashes[str(path)] = digest.hexdigest()
            return self.hashes[str(path)]

    def pay(self, count: int) -> None:
        """Wait until the line has carried ``count`` more bytes."""
        with self.lock:
            self.sent += count
            if self.bandwidth is None:
                return
            self.due = max(self.due, time.monotonic() - 0.02) + count / self.bandwidth
            wait = self.due - time.monotonic()
        if wait > 0:
            time.sleep(wait)


def git_hash(path: Path) -> str:
    """What the hub calls the blob of a small file."""
    return hashlib.sha1(b"blob %d\0" % path.stat().st_size + path.read_bytes()).hexdigest()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    served: Served

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        time.sleep(self.served.latency)
        parts = urlsplit(self.path)
        words = [unquote(word) for word in parts.path.strip("/").split("/")]
        if self.served.token is not None and words[0] != "cdn":
            given = self.headers.get("Authorization")
            if given != f"Bearer {self.served.token}":
                self.refuse(401 if given is None else 403)
                return
        if self.served.status is not None:
            self.refuse(self.served.status)
        elif words[:2] == ["api", "models"]:
            self.listing(words[2:])
        elif "resolve" in words:
            self.resolve(words)
        else:
            self.serve(self.served.of(words) / words[-1], "Authorization" in self.headers and words[0] == "cdn")

    def refuse(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def listing(self, words: list[str]) -> None:
        name = "/".join(words[: words.index("revision")] if "revision" in words else words)
        revision = words[words.index("revision") + 1] if "revision" in words else "main"
        if not name.endswith("tiny") or revision not in ("main", "v1", COMMIT):
            self.refuse(404, X_Error_Code="RevisionNotFound" if name.endswith("tiny") else "RepoNotFound")
            return
        files = []
        for path in sorted(self.served.of(words).iterdir()):
            entry: dict[str, object] = {"rfilename": path.name, "size": path.stat().st_size, "blobId": git_hash(path)}
            if path.suffix == ".safetensors":
                entry["lfs"] = {"size": path.stat().st_size, "sha256": self.served.hash_of(path), "pointerSize": 134}
            files.append(entry)
        body = json.dumps({"_id": "1", "id": name, "modelId": name, "sha": COMMIT, "siblings": files}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def resolve(self, words: list[str]) -> None:
        """The hub answers large files with a redirect; the token must not follow it to another host."""
        path = self.served.of(words) / words[-1]
        at = words[words.index("resolve") + 1]
        assert at == COMMIT or "Range" not in self.headers, "a range is read at the commit, not at the branch"
        assert at == COMMIT or path.suffix != ".safetensors", "weights are read at the commit, not at the branch"
        if not path.is_file():
            self.refuse(404, X_Error_Code="EntryNotFound")
        elif path.suffix != ".safetensors":
            self.serve(path, False, X_Repo_Commit=COMMIT, ETag=f'"{git_hash(path)}"')
        else:
            elsewhere = self.served.address.replace("127.0.0.1", "localhost")
            self.send_response(302)
            self.send_header("Location", f"{elsewhere}/cdn/{words[0]}/{path.name}")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("X-Linked-Etag", f'"{self.served.hash_of(path)}"')
            self.send_header("X-Linked-Size", str(path.stat().st_size))
            self.send_header("Content-Length", "0")
            self.end_headers()

    def serve(self, path: Path, leaked: bool, **more: str) -> None:
        assert not leaked, "the token went to another host"
        if not path.is_file():
            self.refuse(404)
            return
        size = path.stat().st_size
        if self.command == "HEAD" or "Range" not in self.headers:
            self.whole(path, **more)
            return
        asked = self.headers["Range"].removeprefix("bytes=").split("-")
        first, last = int(asked[0]), min(int(asked[1]), size - 1)
        with self.served.lock:
            fault = self.served.faults.pop(0) if self.served.faults and path.suffix == ".safetensors" else None
            self.served.ranges.append((path.name, first, last - first + 1))
        if fault is not None and fault(self, path, first, last):
            return
        if first >= size:
            self.refuse(416)
            return
        self.head(path, first, last, **more)
        self.body(path, first, last - first + 1)

    def whole(self, path: Path, **more: str) -> None:
        """A whole file, or with HEAD what a client has to know before it downloads one."""
        self.send_response(200)
        for name, value in {"Content-Length": str(path.stat().st_size), **more}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            with self.served.lock:
                self.served.ranges.append((path.name, 0, path.stat().st_size))
            self.body(path, 0, path.stat().st_size)

    def head(
        self, path: Path, first: int, last: int, *, length: int | None = None, total: int | None = None, **more: str
    ) -> None:
        self.send_response(206)
        size = path.stat().st_size if total is None else total
        headers = {
            "Content-Range": f"bytes {first}-{last}/{size}",
            "Content-Length": str(last - first + 1 if length is None else length),
            "ETag": f'"{self.served.etag}"',
        }
        for name, value in {**headers, **{key.replace("_", "-"): text for key, text in more.items()}}.items():
            self.send_header(name, value)
        self.end_headers()

    def body(self, path: Path, first: int, count: int) -> None:
        with path.open("rb") as file:
            file.seek(first)
            while count > 0:
                piece = file.read(min(count, 1 << 16))
                self.served.pay(len(piece))
                self.wfile.write(piece)
                count -= len(piece)

    def hang_up(self) -> None:
        """Reset the connection instead of closing it."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that is gone is not an error of the server."""


@contextmanager
def serving(served: Served) -> Iterator[Served]:
    """Serve on a free port; ``served.address`` is the endpoint."""
    handler = type("OwnHandler", (Handler,), {"served": served})
    server = Server(("127.0.0.1", 0), handler)
    served.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    """Serve a folder until the process is ended: ``python -m tests.hub_server FOLDER BYTES_PER_SECOND``."""
    import sys

    folder, bandwidth = Path(sys.argv[1]), float(sys.argv[2])
    with serving(Served(folder, bandwidth=bandwidth or None)) as served:
        for path in folder.glob("*.safetensors"):
            served.hash_of(path)
        print(served.address, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
