"""Where results are kept: a folder, or an address that fsspec opens (``s3://bucket/name``, ``gs://``, ``az://``).

Every command that saves or reads results goes through :func:`place_of`.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from rankscope._files import read_regular
from rankscope._types import path_of
from rankscope.errors import InputError

PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}
"""The package that opens the addresses of a kind."""
_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]+)://")
_BROKEN = re.compile(r"([a-z][a-z0-9+.-]+):/[^/]")


def is_address(given: object) -> bool:
    """Whether it is the address of an object store or another file system of fsspec, rather than a local path.

    Example:
        >>> is_address("s3://bucket/run"), is_address("runs/a")
        (True, False)
    """
    return isinstance(given, str) and _ADDRESS.match(given) is not None and not given.startswith("file://")


def place_of(given: object, what: str, expected: str) -> Place:
    """The place that a folder or an address names; it need not exist.

    Args:
        given: what the caller passed.
        what: the name of the argument, for messages.
        expected: what was expected, for messages.

    Raises:
        InputError: it is neither; the package for the address is missing, and the message says how to install it.
    """
    if isinstance(given, Place):
        return given
    if not is_address(given):
        path = path_of(given.removeprefix("file://") if isinstance(given, str) else given, what, expected)
        broken = _BROKEN.match(str(path))
        if broken and broken[1] in PACKAGES:
            # A Path merges the slashes of s3://bucket, and would make a local folder that is called "s3:".
            raise InputError(f"{what} is the path {str(path)!r}. Pass an address as text: {broken[1]}://...")
        return Place(str(path), os.path.abspath(path))
    address = str(given).rstrip("/")
    scheme = address.partition("://")[0]
    try:
        from fsspec.core import url_to_fs

        store, root = url_to_fs(address, use_listings_cache=False)
    except ImportError as error:
        package = PACKAGES.get(scheme)
        how = f"the package {package}: pip install {package}" if package else f"a package: {error}"
        raise InputError(f"{what}={address!r}: {scheme}:// needs {how}") from error
    except ValueError as error:
        known = ", ".join(f"{name}://" for name in ("s3", "gs", "az"))
        raise InputError(f"{what}={address!r}: {error}. Expected {expected}, or an address such as {known}") from error
    return Place(address, str(root).rstrip("/"), store)


@dataclass(frozen=True)
class Place:
    """A folder or an address. Files in it are written whole or not at all.

    Every method raises OSError, with ``strerror`` in words, whatever the store itself raises.

    Args:
        name: how it is called in messages.
        root: its path in its file system.
        store: the file system of fsspec; None for a local folder.
    """

    name: str
    root: str
    store: Any = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.name

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine."""
        return self.store is None

    def make(self, *folders: str) -> None:
        """Create a folder and others in it; an object store needs none."""
        if self.is_local:
            for name in folders or ("",):
                Path(self.root, name).mkdir(parents=True, exist_ok=True)

    def read(self, name: str, limit: int) -> bytes:
        """The content of a file, of ``limit`` bytes at most."""
        if self.is_local:
            return read_regular(Path(self.root, name), limit)
        with _in_words(f"{self}/{name}"):
            content: bytes = self.store.cat_file(f"{self.root}/{name}", start=0, end=limit + 1)
        if len(content) > limit:
            raise OSError(errno.EFBIG, f"it has more than {limit:,} bytes", name)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Replace a file in one step: a rename, or one PUT."""
        if self.is_local:
            replace_file(Path(self.root, name), content)
        else:
            with _in_words(f"{self}/{name}"):
                self.store.pipe_file(f"{self.root}/{name}", content)

    def create(self, name: str, content: bytes) -> bool:
        """Write a file that nobody has written yet; False if somebody was faster, whose file stays."""
        path = f"{self.root}/{name}"
        if not self.is_local:
            try:
                self.store.pipe_file(path, content, mode="create")  # If-None-Match in an object store
            except Exception as error:  # some stores raise FileExistsError, others OSError
                with _in_words(f"{self}/{name}"):
                    if not self.store.exists(path):
                        raise error
                return False
            return True
        with tempfile.NamedTemporaryFile(dir=self.root) as draft:
            draft.write(content)
            draft.flush()
            try:
                os.link(draft.name, path)
            except FileExistsError:
                return False
            except OSError:  # a file system without links
                replace_file(Path(path), content)
        return True

    def holds(self, name: str) -> bool:
        """Whether a file is there."""
        with _in_words(f"{self}/{name}"):
            return (
                os.path.isfile(f"{self.root}/{name}")
                if self.is_local
                else bool(self.store.exists(f"{self.root}/{name}"))
            )

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        with suppress(FileNotFoundError):
            if self.is_local:
                Path(self.root, name).unlink()
            else:
                with _in_words(f"{self}/{name}"):
                    self.store.rm_file(f"{self.root}/{name}")

    def names(self, folder: str) -> set[str]:
        """The names of the files in a folder, by one listing; none where there is no folder."""
        from pyarrow.fs import FileSelector, FileType

        with _in_words(f"{self}/{folder}"):
            found = self.arrow.get_file_info(FileSelector(f"{self.root}/{folder}", allow_not_found=True))
        return {one.base_name for one in found if one.type == FileType.File}

    @cached_property
    def arrow(self) -> Any:
        """The same file system for Arrow, which lists and reads many files several times faster than fsspec."""
        from pyarrow import fs

        if self.is_local:
            return fs.LocalFileSystem()
        if "s3" not in (self.store.protocol if isinstance(self.store.protocol, tuple) else (self.store.protocol,)):
            return fs.PyFileSystem(fs.FSSpecHandler(self.store))
        end = self.store.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        known = {"access_key": self.store.key, "secret_key": self.store.secret, "session_token": self.store.token}
        if end:
            known |= {"endpoint_override": end, "scheme": end.partition("://")[0]}
        elif region is None:
            with _in_words(self.name):
                region = fs.resolve_s3_region(self.root.partition("/")[0])
        return fs.S3FileSystem(anonymous=bool(self.store.anon), region=region, **known)


@contextmanager
def _in_words(name: str) -> Iterator[None]:
    """Every error of a store as an OSError whose ``strerror`` says what was wrong."""
    try:
        yield
    except FileNotFoundError as error:
        words = " ".join(str(error).split())
        bucket = "bucket" in words.lower()
        raise FileNotFoundError(
            errno.ENOENT, "the bucket does not exist" if bucket else "it does not exist", name
        ) from (error)
    except Exception as error:  # every store raises its own
        words = " ".join(str(error).split())[:300] or type(error).__name__
        if "NoSuchBucket" in words or "bucket does not exist" in words:
            raise FileNotFoundError(errno.ENOENT, "the bucket does not exist", name) from error
        refused = isinstance(error, PermissionError) or "ACCESS_DENIED" in words or "credentials" in words.lower()
        if refused:
            raise PermissionError(errno.EACCES, f"access was refused; check the credentials: {words}", name) from error
        code = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
        raise OSError(code, words, name) from error


def write_page(path: Path, page: str) -> None:
    """Replace a text file atomically; a device or a pipe is written to directly."""
    content = page.encode("utf-8", "replace")
    place = Path(os.path.realpath(path))
    if place.exists() and not place.is_file():
        place.write_bytes(content)
    else:
        replace_file(place, content)


def replace_file(path: Path, content: bytes) -> None:
    """Write to a temporary file in the same folder, flush to disk, rename: atomic."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        # mkstemp creates files that only the owner can read; give it the permissions of an ordinary new file.
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    # The umask can only be read by setting it.
    mask = os.umask(0)
    os.umask(mask)
    return mask
