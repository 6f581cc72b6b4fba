"""Files on the hub or in an object store, read by range.

Requests to the hub go through the client of huggingface_hub, with its proxies, certificates, token
and repetitions; object stores are read through fsspec. Only what would give wrong numbers is checked here: that an
answer is the range that was asked for, and that the file has not changed meanwhile.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rankscope.errors import LoadError, RankscopeError
from rankscope.models.loading.foreign import in_a_line
from rankscope.models.loading.shard_files import INDEX, named_in_index, refuse_large
from rankscope.models.weight_files.files import Traffic, WeightFile, bytes_at

CONNECTIONS = 8
"""Requests to a server at a time."""
_MOST_REPETITIONS = 3
_CONTENT_RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19})")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LARGEST_SIZE = 2**50
_IDENTITY = ("generation", "ETag", "etag", "LastModified", "mtime", "updated", "created")
_ADVICE = {
    401: "Not logged in, or no such model: check the name; for a private or gated model of the hub, log in with "
    "`hf auth login` or set HF_TOKEN.",
    403: "No permission: on the hub, accept the terms on the model's page and use a token that may read gated models; "
    "in a store, check the permissions of your key.",
    404: "Check the name, the revision and the spelling; `hub:OWNER/NAME@REVISION` names a commit, tag or branch.",
}
_ASK_AGAIN = (
    "Check the address and the connection, and repeat the command later, or download the model and pass the folder."
)


@dataclass(frozen=True)
class RemoteFile(WeightFile):
    """A file on a server.

    Attributes:
        content: the bytes between two offsets.
        traffic: counts what is requested.
    """

    name: str
    size: int
    content: Callable[[int, int], bytes]
    traffic: Traffic
    is_remote: bool = True

    def read(self, offset: int, places: Sequence[memoryview]) -> None:
        """Fill ``places`` with one request."""
        count = sum(map(len, places))
        if not count:
            return
        self.traffic.request(count)
        with readable_errors(self.name):
            content = memoryview(self.content(offset, offset + count))
        if len(content) != count:
            raise LoadError(f"{self.name}: {len(content)} bytes came instead of {count}. {_ASK_AGAIN}")
        for place in places:
            place[:], content = content[: len(place)], content[len(place) :]


@contextmanager
def readable_errors(name: str) -> Iterator[None]:
    """Whatever a client raises becomes a LoadError that says what to do; each client has its own classes of errors."""
    try:
        yield
    except RankscopeError:
        raise
    except Exception as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        status = 403 if isinstance(error, PermissionError) else 404 if isinstance(error, FileNotFoundError) else status
        advice = _ADVICE.get(status or 0, _ASK_AGAIN)
        if type(error).__name__ == "OfflineModeIsEnabled":
            advice = "It is not on this machine, and HF_HUB_OFFLINE is set. Unset it, or pass a local folder."
        raise LoadError(f"{name} could not be read: {in_a_line(error)}. {advice}") from error


def _changed(name: str) -> LoadError:
    return LoadError(
        f"{name} changed while it was being read: its size or ETag is not that of the first answer. Nothing was "
        "measured. Repeat the command when the file no longer changes."
    )


def timeout() -> float:
    """Seconds in which a server has to send something; HF_HUB_DOWNLOAD_TIMEOUT sets it."""
    from huggingface_hub import constants

    return float(constants.HF_HUB_DOWNLOAD_TIMEOUT)


class RemoteFolder:
    """A folder on a server; a subclass says which files it has.

    Args:
        name: as the user wrote it.
        traffic: counts what is read.
    """

    revision: str | None = None
    origin: Literal["hub", "url"] = "url"

    def __init__(self, name: str, traffic: Traffic) -> None:
        self.name, self.traffic = name, traffic

    def file(self, name: str) -> WeightFile | None:
        """The file of that name; None if there is none."""
        raise NotImplementedError

    def listed(self) -> list[str]:
        """The names of the safetensors files to read if there is no index."""
        raise NotImplementedError

    def weight_files(self) -> list[WeightFile]:
        """Those that the index names, or all."""
        index = self.file(INDEX)
        names = self.listed() if index is None else named_in_index(_whole(INDEX, index), index.name)
        with ThreadPoolExecutor(CONNECTIONS) as readers:
            files = list(readers.map(self.file, names))
        for name, file in zip(names, files, strict=True):
            if file is None:
                raise LoadError(f"{self.name} has no file {name!r}, which its index names. Its upload is incomplete.")
        return [file for file in files if file is not None]

    @contextmanager
    def copied(self, names: Sequence[str]) -> Iterator[Path]:
        """Copies in a temporary folder, which is removed afterwards."""
        with tempfile.TemporaryDirectory(prefix="rankscope-") as folder, ThreadPoolExecutor(CONNECTIONS) as readers:
            for name, file in zip(names, readers.map(self.file, names), strict=True):
                if file is not None:
                    (Path(folder) / name).write_bytes(_whole(name, file))
            if "config.json" in names and not (Path(folder) / "config.json").is_file():
                raise LoadError(f"{self.name} has no config.json, so it is not a model.")
            yield Path(folder)


def _whole(name: str, file: WeightFile) -> bytes:
    """All of a small file."""
    refuse_large(name, file.size, file.name)
    return bytes_at(file, 0, file.size)


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
        with readable_errors(spec):
            # From here on the commit is what is read, wherever the branch moves.
            self.revision, self.sizes = hub_listing(model, revision)

    def listed(self) -> list[str]:
        """The safetensors files next to config.json."""
        return sorted(name for name in self.sizes if name.endswith(".safetensors"))

    def file(self, name: str) -> WeightFile | None:
        """A file of this commit."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        if name not in self.sizes:
            return None
        where, url = f"{self.name}/{name}", hf_hub_url(self._model, name, revision=self.revision)

        def content(start: int, end: int) -> bytes:
            return _checked(_answer(url, start, end, build_hf_headers()), where, start, end, self.sizes[name])

        return RemoteFile(where, self.sizes[name], content, self.traffic)


def hub_listing(model: str, revision: str | None) -> tuple[str, dict[str, int]]:
    """Commit of a model, and the sizes of its files by name without those in folders: one request, one answer.

    Raises:
        LoadError: the answer is not a list of files.
        HfHubHTTPError: the hub does not have the model, or does not show it to you.
    """
    from huggingface_hub import HfApi

    found = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=timeout())
    sizes = {entry.rfilename: entry.size for entry in found.siblings or () if "/" not in entry.rfilename}
    are_sizes = all(type(size) is int and 0 <= size <= _LARGEST_SIZE for size in sizes.values())
    if not are_sizes or not _COMMIT.fullmatch(found.sha or ""):
        raise LoadError(f"hub:{model}: the hub's list of files has no commit, or files without a size. {_ASK_AGAIN}")
    return str(found.sha), {name: size for name, size in sizes.items() if size is not None}


def _answer(url: str, start: int, end: int, headers: Mapping[str, str]) -> Any:
    """The answer to a request for a range; the client repeats it after failures that may pass."""
    from huggingface_hub.utils import http_backoff  # type: ignore[attr-defined]

    asked = {**headers, "Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    return http_backoff("GET", url, headers=asked, timeout=timeout(), max_retries=_MOST_REPETITIONS)


def _checked(answer: Any, name: str, start: int, end: int, size: int) -> bytes:
    """The content of an answer, if it is the range that was asked for, of a file of this size."""
    from huggingface_hub.utils import hf_raise_for_status  # type: ignore[attr-defined]

    hf_raise_for_status(answer)
    match = _CONTENT_RANGE.fullmatch(answer.headers.get("content-range", ""))
    if match is None or (int(match[1]), int(match[2])) != (start, end - 1):
        raise LoadError(
            f"{name}: the server does not send the bytes {start} to {end - 1} that were asked for. Download the model "
            "and pass the folder."
        )
    if int(match[3]) != size:
        raise _changed(name)
    return bytes(answer.content)


class StoreFolder(RemoteFolder):
    """A folder of an object store.

    Args:
        url: its address, ``s3://`` or ``gs://``.
        traffic: counts what is read.

    Raises:
        LoadError: the package for this kind of store is not installed, or it cannot be listed.
    """

    def __init__(self, url: str, traffic: Traffic) -> None:
        super().__init__(url, traffic)
        scheme, _, path = url.rstrip("/").partition("://")
        self._store = _store(scheme)
        with readable_errors(url):
            listing = self._store.ls(path, detail=True, refresh=True)
        self._paths = {str(entry["name"]).rpartition("/")[2]: str(entry["name"]) for entry in listing}

    def listed(self) -> list[str]:
        """The safetensors files of the folder."""
        return sorted(name for name in self._paths if name.endswith(".safetensors"))

    def file(self, name: str) -> WeightFile | None:
        """The file of that name; each read is followed by a look at its ETag, which must still be that of the first."""
        if name not in self._paths:
            return None
        where, path = f"{self.name}/{name}", self._paths[name]
        with readable_errors(where):
            size, tag = self._facts(path)

        def content(start: int, end: int) -> bytes:
            found: bytes = self._store.cat_ranges([path], [start], [end], on_error="raise")[0]
            if self._facts(path) != (size, tag):
                raise _changed(where)
            return found

        return RemoteFile(where, size, content, self.traffic)

    def _facts(self, path: str) -> tuple[int, str]:
        """Size of an object, and the strongest thing that identifies its content."""
        entry = self._store.info(path, refresh=True)
        return int(entry["size"]), next((f"{key} {entry[key]}" for key in _IDENTITY if entry.get(key) is not None), "")


def _store(scheme: str) -> Any:
    import fsspec

    try:
        return fsspec.filesystem(scheme, use_listings_cache=False)
    except ImportError as error:
        package = "s3fs" if scheme == "s3" else "gcsfs"
        raise LoadError(f"{scheme}:// needs the package {package}: pip install {package}.") from error
