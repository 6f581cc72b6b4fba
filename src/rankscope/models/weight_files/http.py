"""Range requests over HTTP, to the hub or to any web server.

Each answer is checked before a byte of it is used: its range, the size of the whole file and the file's ETag must be
those of the first answer. A request that fails continues at the byte at which it stopped. The requests go through the
client of huggingface_hub, with its proxies, certificates and token, within the limits of
:mod:`rankscope.models.loading.wire`; its own file system and downloads are not used, because they neither check answers
nor limit them.
"""

from __future__ import annotations

import hashlib
import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from time import sleep
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlsplit

from rankscope.errors import LoadError, RankscopeError
from rankscope.models.loading.foreign import in_a_line
from rankscope.models.loading.wire import OVERHEAD, Allowance, BadAnswerError, limited, session
from rankscope.models.weight_files.files import Traffic, WeightFile
from rankscope.models.weight_files.kept import kept_file
from rankscope.models.weight_files.remote_folder import RemoteFolder
from rankscope.runs.plain_json import parse_json

MOST_FAILURES = 8
MOST_FAILURES_AT_FIRST = 4
"""Before anything was received: the server may not exist, and nobody wants to wait a minute to hear that."""
LONGEST_WAIT = 60.0
PATIENCE = 16.0
"""Seconds that the failures of one read may take in all, pauses included; see :func:`_patience`."""
LARGEST_LISTING = 16 * 2**20
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_RESET = re.compile(r";\s*t=(\d{1,9})")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST_SIZE = 2**50
_T = TypeVar("_T")
_now: ContextVar[tuple[float, Allowance]] = ContextVar("now")
"""Seconds of patience and bytes that are left for the attempt that runs; set by :func:`repeated`."""


class Again(Exception):  # noqa: N818  (not an error: the request is repeated)
    """A request that may succeed if it is repeated.

    Args:
        why: the reason, for the message if it never succeeds.
        wait: seconds that the server asked to wait; None if it did not.
    """

    def __init__(self, why: str, wait: float | None = None) -> None:
        super().__init__(why)
        self.wait = wait


class HttpFile:
    """A file on a web server.

    Args:
        url: its address.
        name: its name in messages.
        traffic: counts what is read.
        size: its size.
        headers: sent with each request to this address, and not to other hosts.
        tags: what is known to identify its content; see :func:`_tags`.
    """

    is_remote = True

    def __init__(
        self,
        url: str,
        name: str,
        traffic: Traffic,
        size: int,
        headers: dict[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.size = name, size
        self._url, self._traffic, self._headers = url, traffic, headers or {}
        self._tags = dict(tags or {})

    @property
    def identity(self) -> str:
        """Name, size, and hash or ETag."""
        return f"{self.name}:{self.size}:{sorted(self._tags.items())}"

    def fetch(self, offset: int, count: int) -> None:
        """There is nobody to advise: whoever reads ahead does it with :meth:`read`."""

    def read(self, offset: int, places: Sequence[memoryview]) -> None:
        """Fill ``places``; a request that fails continues where it stopped."""
        filling = _Filling(places)

        def attempt() -> None:
            while filling.left:
                start = offset + filling.done
                self._request(start, start + filling.left, filling.add)

        repeated(attempt, self.name, self._traffic, filling.left)

    def _request(self, start: int, end: int, add: Callable[[bytes], None]) -> None:
        headers = {**self._headers, "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        wanted = end - start
        with self._traffic.request(wanted) as arrived, _asked(self._url, headers, self.name, wanted) as answer:
            refuse_status(answer, self.name)
            expected = self._checked(answer, start, end) - start
            received = 0
            for piece in answer.iter_raw():
                arrived(len(piece))
                received += len(piece)
                if received > expected:
                    raise Again(f"more than the {expected} bytes it announced")
                add(piece)
            if received < expected:
                raise Again(f"{received} bytes instead of the {expected} it announced")
            if received < min(wanted, OVERHEAD):  # else a server could make one read a million requests
                raise Again(f"{received} of {wanted} bytes")

    def _checked(self, answer: Any, start: int, end: int) -> int:
        """Where the bytes of an answer end; raises for an answer that is not part of the file that was opened."""
        if answer.status_code == 200:
            if (start, end) != (0, self.size):
                raise LoadError(
                    f"{self.name}: the server sends the whole file instead of a range of it. Download the model and "
                    "pass the folder."
                )
            span, total = (0, self.size - 1), _number(answer.headers.get("content-length", str(self.size)))
        else:
            match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
            if match is None:
                raise Again("an answer that does not say which range it is")
            span, total = (int(match[1]), int(match[2])), int(match[3])
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise Again(f"an answer encoded as {answer.headers['content-encoding']}")
        if total != self.size:
            raise changed(self.name)
        self._compare_tags(_tags(answer))
        if span[0] != start or not start <= span[1] < end:
            raise Again(f"bytes {span[0]} to {span[1]} instead of {start} to {end - 1}")
        return span[1] + 1

    def _compare_tags(self, tags: Mapping[str, str]) -> None:
        """Raise unless an answer states again what is known.

        Without this, a server could send other bytes after leaving out the tag that would show it. If nothing is known
        yet, this answer says what the others must state.
        """
        if not self._tags:
            self._tags.update(tags)
        for kind, known in self._tags.items():
            # A server that has the whole file itself states the hash as an ordinary ETag.
            stated = tags.get(kind) or (tags.get("etag", "").strip('"') if kind == "hash" else None)
            if not stated:
                raise LoadError(
                    f"{self.name}: an answer does not state the {kind} {known[:80]!r} of the file any more, so it is "
                    "unknown whether the file has changed. Nothing was measured. Repeat the command, or download the "
                    "model and pass the folder."
                )
            if stated != known:
                raise changed(self.name)


class _Filling:
    """Memory that is filled piece by piece."""

    def __init__(self, places: Sequence[memoryview]) -> None:
        self._places = [place for place in places if len(place)]
        self.done = 0
        self.left = sum(map(len, self._places))

    def add(self, piece: bytes) -> None:
        """Copy a piece to where the last one ended."""
        self.done += len(piece)
        self.left -= len(piece)
        rest = memoryview(piece)
        while rest:
            place = self._places[0]
            count = min(len(place), len(rest))
            place[:count] = rest[:count]
            rest = rest[count:]
            if count == len(place):
                del self._places[0]
            else:
                self._places[0] = place[count:]


def repeated(attempt: Callable[[], _T], name: str, traffic: Traffic, content: int = 0) -> _T:
    """Repeat what fails for a passing reason, with growing pauses, as long as there is patience.

    Args:
        attempt: makes requests, and raises :class:`Again`.
        name: of the file, for messages.
        traffic: counts the attempts.
        content: bytes that all attempts together should bring; what they bring beyond that is limited.

    Raises:
        LoadError: it failed too often or for too long, or the server asks for a pause that is too long.
    """
    left = _patience(traffic)
    with limited(content, MOST_FAILURES) as allowance:
        for failures in range(1, MOST_FAILURES + 1):
            before, began = _now.set((left, allowance)), time.monotonic()
            try:
                return attempt()
            except Again as error:
                if traffic.is_stopped:
                    raise LoadError(f"{name}: reading was stopped.") from error
                wait = error.wait if error.wait is not None else random.uniform(0.5, 1.0) * 2 ** (failures - 2)
                # What arrived before the failure was not in vain: a failure costs the time of one window at most.
                left -= min(time.monotonic() - began, timeout()) + wait
                most = MOST_FAILURES if traffic.received else MOST_FAILURES_AT_FIRST
                if failures >= most or wait > LONGEST_WAIT or left <= 0 or allowance.is_spent:
                    raise gave_up(name, failures, error) from error
                traffic.count_retry()
                sleep(wait)
            finally:
                _now.reset(before)
    raise AssertionError("unreachable")


def _patience(traffic: Traffic) -> float:
    """Seconds for the failures of one read.

    Long enough for a second attempt after one that timed out, and longer the longer the server has been read from, so
    that an hour of work does not end with a minute's outage.
    """
    return max(PATIENCE, 1.6 * timeout()) + traffic.age / 10


def gave_up(name: str, failures: int, error: Exception) -> LoadError:
    """An error for requests that failed too often."""
    wait = error.wait if isinstance(error, Again) else None
    asked = "" if wait is None else f" and a request to wait {wait:.0f} s"
    why = error if isinstance(error, Again) else in_a_line(error)
    return LoadError(
        f"{name} could not be read: {failures} attempts failed, the last with {why}{asked}. Check the connection and "
        "repeat the command later (with --work it resumes after the last finished block), or download the model and "
        "pass the folder."
    )


def changed(name: str) -> LoadError:
    """An error for a file that is not the one that was opened."""
    return LoadError(
        f"{name} changed while it was being read: its size or ETag is not that of the first answer. Nothing was "
        "measured. Repeat the command when the file no longer changes; on the hub, pin a commit with hub:NAME@COMMIT."
    )


def timeout() -> float:
    """Seconds of a window in which a server has to send something; HF_HUB_DOWNLOAD_TIMEOUT sets it."""
    from huggingface_hub import constants

    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


@contextmanager
def _asked(url: str, headers: dict[str, str], name: str, content: int) -> Iterator[Any]:
    """The answer to a GET request, not read yet; failures of the connection are worth another attempt.

    Every request of rankscope to a web server or the hub goes through here, so every answer has the same limits.

    Args:
        url: the address.
        headers: sent to this host, and not to others.
        name: of the file, for messages.
        content: the number of bytes that the answer should have at most.
    """
    patience, allowance = _now.get()
    window = min(timeout(), max(patience, 0.1))
    allowance.begin(content, window)
    try:
        with session().stream("GET", url, headers=headers, timeout=window, follow_redirects=True) as answer:
            allowance.head_ends()
            yield answer
    except (Again, RankscopeError):
        raise
    except Exception as error:
        raise _network_error(error, name) from error


def _network_error(error: Exception, name: str) -> Exception:
    """What an exception of the HTTP client means; the class comes from httpx or httpx2, whichever the hub uses."""
    if isinstance(error, BadAnswerError):
        return Again(str(error))
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "OfflineModeIsEnabled" in kinds:
        return LoadError(f"{name} is not on this machine, and HF_HUB_OFFLINE is set. Unset it, or pass a local folder.")
    if kinds & {"TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError", "OSError"}:
        return Again(in_a_line(error))
    return LoadError(f"{name} could not be read: {in_a_line(error)}. Check the address.")


def refuse_status(answer: Any, name: str) -> None:
    """Raise for an answer that is not the file.

    Raises:
        LoadError: with what to do.
    """
    status = answer.status_code
    if status in (200, 206):
        return
    if status in _AGAIN:
        raise Again(_reason(status), _pause(answer.headers))
    if status in (412, 416):
        raise changed(name)
    raise LoadError(f"{name} could not be read: {_reason(status)}. {_advice(status)}")


def _reason(status: int) -> str:
    from http import HTTPStatus

    words = HTTPStatus(status).phrase if status in {one.value for one in HTTPStatus} else "unknown status"
    return f"{status} {words}"


def _advice(status: int) -> str:
    if status == 401:
        return (
            "The server wants to know who you are, or there is no such model: check the name; for a private or gated "
            "model of the hub log in with `hf auth login` or set HF_TOKEN."
        )
    if status == 403:
        return (
            "You are known but not admitted: on the hub, accept the terms on the model's page and use a token that may "
            "read gated models; in a store, check the permissions of your key."
        )
    if status in (404, 410):
        return "Check the name, the revision and the spelling; `hub:OWNER/NAME@REVISION` names a commit, tag or branch."
    return "Check the address."


def _pause(headers: Any) -> float | None:
    """Seconds that an answer asks to wait: Retry-After as a number or date, or the hub's RateLimit header."""
    asked = headers.get("retry-after")
    if asked is not None:
        return float(asked) if asked.isdecimal() and len(asked) < 10 else _until(asked)
    reset = _RESET.search(headers.get("ratelimit", ""))
    return None if reset is None else float(reset[1])


def _until(date: str) -> float | None:
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(date).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return None


def _number(digits: str) -> int:
    """A count in a header; -1 for what is not one."""
    return int(digits) if digits.isdecimal() and len(digits) < 20 else -1


def _tags(answer: Any) -> dict[str, str]:
    """What identifies the content: the hub's hash of it, else the ETag, else the time of its last change.

    The hub redirects to a server that may be another one for each request; only the hub's own header stays the same.
    """
    for step in (*answer.history, answer):
        linked = step.headers.get("x-linked-etag")
        if linked is not None:
            return {"hash": str(linked).strip('"')}
    for kind in ("etag", "last-modified"):
        if kind in answer.headers:
            return {kind: str(answer.headers[kind])}
    return {}


class HubFolder(RemoteFolder):
    """A model on the hub, at one commit.

    Args:
        model: its id.
        revision: branch, tag or commit; None for the default branch.
        spec: as the user wrote it.
        traffic: counts what is read.

    Raises:
        LoadError: the hub does not have it, or does not show it to you.
    """

    origin: Literal["hub", "url"] = "hub"

    def __init__(self, model: str, revision: str | None, spec: str, traffic: Traffic) -> None:
        super().__init__(spec, traffic)
        self._model = model
        largest = min(LARGEST_LISTING, LARGEST_LISTING if traffic.budget is None else traffic.budget)
        # From here on the commit is what is read, wherever the branch moves.
        self.revision, self._files = repeated(lambda: _listing(model, revision, spec, largest), spec, traffic, largest)

    def listed(self) -> list[str]:
        """The safetensors files next to config.json."""
        return sorted(name for name in self._files if "/" not in name and name.endswith(".safetensors"))

    def file(self, name: str) -> WeightFile | None:
        """A file of this commit."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        entry = self._files.get(name)
        if entry is None:
            return None
        url = hf_hub_url(self._model, name, revision=self.revision)
        tags = {"hash": entry.sha256} if entry.sha256 else {}
        file = HttpFile(url, f"{self.name}/{name}", self.traffic, entry.size, build_hf_headers(), tags)
        return kept_file(file, entry.sha256, self.traffic) if entry.sha256 and name.endswith(".safetensors") else file

    @property
    def names(self) -> list[str]:
        """All files of this commit."""
        return sorted(self._files)

    def listed_file(self, name: str) -> Listed | None:
        """What the listing says about a file; None if there is none."""
        return self._files.get(name)

    def check(self, name: str, content: bytes) -> None:
        """Raise unless a whole file has the hash that the hub has listed."""
        listed = self._files[name]
        digest = hashlib.sha256() if listed.sha256 else hashlib.sha1(b"blob %d\0" % len(content))
        digest.update(content)
        refuse_other_content(f"{self.name}/{name}", listed, digest.hexdigest())


@dataclass(frozen=True)
class Listed:
    """A file as the hub lists it.

    Attributes:
        size: number of bytes.
        blob: what identifies the content, and is the ETag of its answers: the SHA-256, or git's own hash of a small
            file, which is the SHA-1 of the content after the word "blob" and its size.
        sha256: hash of the content; None for small files.
    """

    size: int
    blob: str
    sha256: str | None


def _listing(model: str, revision: str | None, spec: str, largest: int) -> tuple[str, dict[str, Listed]]:
    """Commit and files of a model; one request of at most ``largest`` bytes."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    at = "" if revision is None else f"/revision/{quote(revision, safe='')}"
    url = f"{constants.ENDPOINT}/api/models/{model}{at}?blobs=true"
    headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
    content = bytearray()
    with _asked(url, headers, spec, largest) as answer:
        refuse_status(answer, spec)
        for piece in answer.iter_raw():
            content += piece
            if len(content) > largest:
                raise LoadError(f"{spec}: the hub's list of files has more than {largest:,} bytes. It was not read.")
    try:
        listing = parse_json(bytes(content))
    except ValueError as error:
        raise Again(in_a_line(error)) from error
    try:
        files = {entry["rfilename"]: _listed(entry) for entry in listing["siblings"]}
        if not _COMMIT.fullmatch(listing["sha"]):
            raise ValueError(f"the commit {listing['sha']!r:.80}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise LoadError(
            f"{spec}: the hub's list of files cannot be read ({in_a_line(error)}). Check HF_ENDPOINT, or download the "
            "model and pass the folder."
        ) from error
    return listing["sha"], files


def _listed(entry: Any) -> Listed:
    size, lfs = entry.get("size"), entry.get("lfs")
    name, blob = entry["rfilename"], entry["blobId"] if lfs is None else lfs["sha256"]
    if type(size) is not int or not 0 <= size <= _LARGEST_SIZE or not isinstance(name, str):
        raise ValueError(f"a file {name!r:.80} of {size!r:.80} bytes")
    if not (_COMMIT if lfs is None else _SHA256).fullmatch(blob):
        raise ValueError(f"the hash {blob!r:.80}")
    return Listed(size, blob, None if lfs is None else blob)


def refuse_other_content(name: str, listed: Listed, found: str) -> None:
    """Raise unless a file has the hash that the hub has listed.

    Raises:
        LoadError: with both hashes.
    """
    if found != listed.blob:
        raise LoadError(
            f"{name} is not the file that the hub lists: its hash is {found[:12]}, and the hub states "
            f"{listed.blob[:12]}. It was not used. Repeat the command; if it happens again, report it to whoever runs "
            "the server."
        )


class UrlFolder(RemoteFolder):
    """A folder on a web server; what is in it is found by asking for known names.

    Args:
        url: its address.
        traffic: counts what is read.

    Raises:
        LoadError: the address holds a password or a query, which results would record.
    """

    def __init__(self, url: str, traffic: Traffic) -> None:
        parts = urlsplit(url)
        if parts.username is not None or parts.password is not None or parts.query or parts.fragment:
            raise LoadError(
                "The address of a model has no user name, password, query or fragment: it is recorded with the "
                "results. Pass the plain address of a folder."
            )
        super().__init__(url, traffic)
        self._base = url.rstrip("/")

    def listed(self) -> list[str]:
        """The one file of a model without an index, if it is there."""
        return ["model.safetensors"] if self.file("model.safetensors") is not None else []

    def file(self, name: str) -> WeightFile | None:
        """The file of that name, if the server has it."""
        url = f"{self._base}/{quote(name)}"
        return repeated(lambda: _probed(url, self.traffic), url, self.traffic, 1)


def _probed(url: str, traffic: Traffic) -> HttpFile | None:
    """Ask for one byte: the answer has the size of the whole file. Not every server answers HEAD.

    A server that does not know ranges begins to send the whole file; nothing of it is read then.
    """
    headers = {"Range": "bytes=0-0", "Accept-Encoding": "identity"}
    with traffic.request(1) as arrived, _asked(url, headers, url, 1) as answer:
        if answer.status_code in (404, 410):
            return None
        if answer.status_code == 416:  # the range does not exist: the file is empty
            return HttpFile(url, url, traffic, 0)
        refuse_status(answer, url)
        match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
        size = int(match[3]) if match else _number(answer.headers.get("content-length", ""))
        if not 0 <= size <= _LARGEST_SIZE:
            raise LoadError(f"{url}: the server names neither a range nor a size. Download the model, pass the folder.")
        if match is not None:
            content = b"".join(answer.iter_raw())  # at most what _asked allows
            arrived(len(content))
            if (match[1], match[2], len(content)) != ("0", "0", 1):
                raise Again(f"{len(content)} bytes, as {match[1]} to {match[2]}, instead of the first byte")
        return HttpFile(url, url, traffic, size, tags=_tags(answer))
