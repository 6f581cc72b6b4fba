"""Range requests over HTTP, to the hub or to any web server.

Each answer is checked before a byte of it is used: its range, the size of the whole file and the file's ETag must be
those of the first answer. A request that fails continues at the byte at which it stopped. The requests go through the
client of huggingface_hub, with its proxies, certificates and token; its own file system is not used, because it neither
checks answers nor continues inside a range.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import sleep
from typing import Any, Literal, TypeVar
from urllib.parse import quote, urlsplit

from rankscope.errors import LoadError, RankscopeError
from rankscope.models.loading.foreign import in_a_line
from rankscope.models.weight_files.files import Traffic, WeightFile
from rankscope.models.weight_files.kept import kept
from rankscope.models.weight_files.remote_folder import RemoteFolder

MOST_FAILURES = 8
MOST_FAILURES_AT_FIRST = 4
"""Before anything was received: the server may not exist, and nobody wants to wait a minute to hear that."""
LONGEST_WAIT = 60.0
SLOWEST = 1024
"""Bytes per second, over a whole timeout; a connection that is slower is given up and opened anew."""
_AGAIN = (408, 425, 429, 500, 502, 503, 504)
_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")
_RESET = re.compile(r";\s*t=(\d+)")
_T = TypeVar("_T")


class _Again(Exception):  # noqa: N818  (not an error: the request is repeated)
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

        repeated(attempt, self.name, self._traffic)

    def _request(self, start: int, end: int, add: Callable[[bytes], None]) -> None:
        headers = {**self._headers, "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
        with self._traffic.request(end - start) as arrived, _asked(self._url, headers, self.name) as answer:
            refuse_status(answer, self.name)
            expected = self._checked(answer, start, end) - start
            began, timeout = time.monotonic(), _timeout()
            received = 0
            for piece in answer.iter_raw():
                arrived(len(piece))
                received += len(piece)
                if received > expected:
                    raise _Again(f"more than the {expected} bytes it announced")
                add(piece)
                waited = time.monotonic() - began
                if waited > timeout and received < SLOWEST * waited:
                    raise _Again(f"only {received} bytes in {waited:.0f} s")
            if received < expected:
                raise _Again(f"{received} bytes instead of the {expected} it announced")

    def _checked(self, answer: Any, start: int, end: int) -> int:
        """Where the bytes of an answer end; raises for an answer that is not part of the file that was opened."""
        if answer.status_code == 200:
            if (start, end) != (0, self.size):
                raise LoadError(
                    f"{self.name}: the server sends the whole file instead of a range of it. Download the model and "
                    "pass the folder."
                )
            found, total = (0, self.size - 1), int(answer.headers.get("content-length", self.size))
        else:
            match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
            if match is None:
                raise _Again("an answer that does not say which range it is")
            found, total = (int(match[1]), int(match[2])), int(match[3])
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise _Again(f"an answer encoded as {answer.headers['content-encoding']}")
        tags = _tags(answer)
        if total != self.size or any(self._tags.get(kind, tag) != tag for kind, tag in tags.items()):
            raise changed(self.name)
        if found[0] != start or not start <= found[1] < end:
            raise _Again(f"bytes {found[0]} to {found[1]} instead of {start} to {end - 1}")
        self._tags.update(tags)
        return found[1] + 1


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


def repeated(attempt: Callable[[], _T], name: str, traffic: Traffic) -> _T:
    """Repeat what fails for a passing reason, with growing pauses.

    Raises:
        LoadError: it failed too often, or the server asks for a pause that is too long.
    """
    for failures in range(1, MOST_FAILURES + 1):
        try:
            return attempt()
        except _Again as error:
            if traffic.is_stopped:
                raise LoadError(f"{name}: reading was stopped.") from error
            wait = error.wait if error.wait is not None else random.uniform(0.5, 1.0) * 2 ** (failures - 2)
            most = MOST_FAILURES if traffic.received else MOST_FAILURES_AT_FIRST
            if failures >= most or wait > LONGEST_WAIT:
                raise gave_up(name, failures, error) from error
            traffic.count_retry()
            sleep(wait)
    raise AssertionError("unreachable")


def gave_up(name: str, failures: int, error: Exception) -> LoadError:
    """An error for requests that failed too often."""
    wait = error.wait if isinstance(error, _Again) else None
    asked = "" if wait is None else f" and a request to wait {wait:.0f} s"
    why = error if isinstance(error, _Again) else in_a_line(error)
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


def _timeout() -> float:
    from huggingface_hub import constants

    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


@contextmanager
def _asked(url: str, headers: dict[str, str], name: str) -> Iterator[Any]:
    """The answer to a GET request, not read yet; failures of the connection are worth another attempt."""
    from huggingface_hub import get_session

    client = get_session()
    try:
        with client.stream("GET", url, headers=headers, timeout=_timeout(), follow_redirects=True) as answer:
            yield answer
    except (_Again, RankscopeError):
        raise
    except Exception as error:
        raise _network_error(error, name) from error


def _network_error(error: Exception, name: str) -> Exception:
    """What an exception of the HTTP client means; the class comes from httpx or httpx2, whichever the hub uses."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    if "OfflineModeIsEnabled" in kinds:
        return LoadError(f"{name} is not on this machine, and HF_HUB_OFFLINE is set. Unset it, or pass a local folder.")
    if kinds & {"TimeoutException", "NetworkError", "RemoteProtocolError", "ProxyError", "OSError"}:
        return _Again(in_a_line(error))
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
        raise _Again(_reason(status), _pause(answer.headers))
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
        try:
            return max(0.0, float(asked))
        except ValueError:
            return _until(asked)
    reset = _RESET.search(headers.get("ratelimit", ""))
    return None if reset is None else float(reset[1])


def _until(date: str) -> float | None:
    from email.utils import parsedate_to_datetime

    try:
        return max(0.0, parsedate_to_datetime(date).timestamp() - time.time())
    except (ValueError, TypeError):
        return None


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
        found = repeated(lambda: _listing(model, revision, spec), spec, traffic)
        # From here on the commit is what is read, wherever the branch moves.
        self.revision = str(found.sha)
        self._files = {str(entry.rfilename): entry for entry in found.siblings or ()}

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
        if type(entry.size) is not int:
            raise LoadError(f"{self.name}/{name}: the hub does not say how large it is.")
        url = hf_hub_url(self._model, name, revision=self.revision)
        tags = {} if entry.lfs is None else {"hash": str(entry.lfs["sha256"])}
        found = HttpFile(url, f"{self.name}/{name}", self.traffic, entry.size, build_hf_headers(), tags)
        return kept(found, tags["hash"], self.traffic) if tags and name.endswith(".safetensors") else found


def _listing(model: str, revision: str | None, spec: str) -> Any:
    """Commit and files of a model; one request."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return HfApi().model_info(model, revision=revision, files_metadata=True, timeout=_timeout())
    except HfHubHTTPError as error:
        refuse_status(error.response, spec)
        raise
    except ValueError as error:  # not JSON, or not what the hub sends
        raise _Again(in_a_line(error)) from error
    except Exception as error:
        raise _network_error(error, spec) from error


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
        return repeated(lambda: _probed(url, self.traffic), url, self.traffic)


def _probed(url: str, traffic: Traffic) -> HttpFile | None:
    """Ask for one byte: the answer has the size of the whole file. Not every server answers HEAD."""
    headers = {"Range": "bytes=0-0", "Accept-Encoding": "identity"}
    with traffic.request(1) as arrived, _asked(url, headers, url) as answer:
        if answer.status_code in (404, 410):
            return None
        if answer.status_code == 416:  # the range does not exist: the file is empty
            return HttpFile(url, url, traffic, 0)
        refuse_status(answer, url)
        match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
        if match is not None:
            arrived(sum(map(len, answer.iter_raw())))
            return HttpFile(url, url, traffic, int(match[3]), tags=_tags(answer))
        length = answer.headers.get("content-length", "")
        if not length.isdigit():
            raise LoadError(f"{url}: the server names neither a range nor a size. Download the model, pass the folder.")
        return HttpFile(url, url, traffic, int(length), tags=_tags(answer))
