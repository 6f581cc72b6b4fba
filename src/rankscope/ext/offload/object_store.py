"""Models in an object store (``s3://``, ``gs://``), read through fsspec."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Thread
from typing import Any

from rankscope.errors import LoadError, RankscopeError
from rankscope.models.loading.foreign import in_a_line
from rankscope.models.loading.wire import SLOWEST
from rankscope.models.weight_files.files import Traffic, WeightFile
from rankscope.models.weight_files.folders import REMOTE
from rankscope.models.weight_files.http import Again, changed, repeated, timeout
from rankscope.models.weight_files.remote_folder import RemoteFolder

_IDENTITY = ("generation", "ETag", "etag", "LastModified", "mtime", "updated", "created")


class StoreFolder(RemoteFolder):
    """A folder of an object store.

    Args:
        url: its address.
        traffic: counts what is read.

    Raises:
        LoadError: the package for this kind of store is not installed.
        LoadError: it cannot be listed.
    """

    def __init__(self, url: str, traffic: Traffic) -> None:
        super().__init__(url, traffic)
        scheme, _, self._path = url.rstrip("/").partition("://")
        self._store = _store(scheme)
        listing = _asked(lambda: self._store.ls(self._path, detail=True, refresh=True), url, traffic)
        self._files = {str(entry["name"]).rpartition("/")[2]: entry for entry in listing if entry["type"] == "file"}

    def listed(self) -> list[str]:
        """The safetensors files of the folder."""
        return sorted(name for name in self._files if name.endswith(".safetensors"))

    def file(self, name: str) -> WeightFile | None:
        """The file of that name."""
        if name not in self._files:
            return None
        # Not the entry of the listing: what identifies an object may be written differently there.
        path = str(self._files[name]["name"])
        entry = _asked(lambda: self._store.info(path, refresh=True), f"{self.name}/{name}", self.traffic)
        return _StoreFile(self._store, f"{self.name}/{name}", entry, self.traffic)


class _StoreFile:
    """One object; a read is followed by a look at its ETag, which must still be that of the first look.

    Args:
        store: the file system of fsspec.
        name: its address.
        entry: what the store says about it.
        traffic: counts what is read.
    """

    is_remote = True

    def __init__(self, store: Any, name: str, entry: Any, traffic: Traffic) -> None:
        self._store, self._path, self._traffic = store, str(entry["name"]), traffic
        self.name, self.size = name, int(entry["size"])
        self._facts = _facts(entry)

    @property
    def identity(self) -> str:
        """Name, size and ETag."""
        return f"{self.name}:{self.size}:{self._facts}"

    def fetch(self, offset: int, count: int) -> None:
        """There is nobody to advise."""

    def read(self, offset: int, places: Sequence[memoryview]) -> None:
        """Fill ``places`` with one request."""
        count = sum(map(len, places))
        content = _asked(lambda: self._content(offset, count), self.name, self._traffic, count)
        start = 0
        for place in places:
            place[:] = content[start : start + len(place)]
            start += len(place)

    def _content(self, offset: int, count: int) -> memoryview:
        with self._traffic.request(count) as arrived:
            content = self._store.cat_file(self._path, start=offset, end=offset + count)
            arrived(len(content))
        # After the read: bytes that were read before a look that finds the old ETag are those of the old object.
        now = self._store.info(self._path, refresh=True)
        if int(now["size"]) != self.size or _facts(now) != self._facts:
            raise changed(self.name)
        if len(content) != count:
            raise OSError(f"{len(content)} bytes instead of {count}")
        return memoryview(content)


def _facts(entry: Any) -> str:
    """The strongest thing that identifies the content of an object."""
    return next((f"{name} {entry[name]}" for name in _IDENTITY if entry.get(name) is not None), "")


def _store(scheme: str) -> Any:
    import fsspec

    try:
        return fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        if scheme == "s3":
            raise LoadError("s3:// needs the package s3fs: pip install s3fs.") from error
        raise LoadError("gs:// needs the package gcsfs: pip install gcsfs.") from error


def _asked(ask: Callable[[], Any], name: str, traffic: Traffic, content: int = 0) -> Any:
    """Ask the store, for as long as a web server would be given.

    Args:
        ask: calls the store's own client, which repeats a request that failed before it raises.
        name: of the file, for messages.
        traffic: counts the attempts.
        content: number of bytes that are wanted.
    """

    def attempt() -> Any:
        try:
            return _in_time(ask, timeout() + content / SLOWEST)
        except RankscopeError:
            raise
        except FileNotFoundError as error:
            raise LoadError(f"{name} does not exist. Check the bucket and the path.") from error
        except PermissionError as error:
            raise LoadError(
                f"{name} could not be read: {in_a_line(error)}. Check your credentials and their permissions."
            ) from error
        except Exception as error:  # every store raises its own
            raise Again(in_a_line(error)) from error

    return repeated(attempt, name, traffic)


def _in_time(ask: Callable[[], Any], seconds: float) -> Any:
    """The answer, or TimeoutError; the clients of stores have timeouts between two bytes only.

    The thread is a daemon, because nothing can end it and the program must not wait for it.
    """
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:  # noqa: BLE001  (handed on to the thread that waits)
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    try:
        return future.result(seconds)
    except TimeoutError as error:
        if future.done():
            raise
        raise TimeoutError(f"no answer in {seconds:.0f} s") from error


REMOTE.add("s3://", StoreFolder)
