"""Files of equal content are read once: those that a fine-tuned copy has in common with its base model.

Off unless ``RANKSCOPE_KEEP_GIB`` allows a size. Then what is read of a file whose SHA-256 the hub states is also
written to the cache folder. When the same hash is asked for again, the rest is read, the whole is hashed here, and only
content that has the hash is used; content that does not is dropped, and the file is read from its own server. A hash
that is only stated is thus never a reason to use other bytes. In the other direction, every few MiB a sample is read
from the server of the model and compared with what stands in for it: a file that is not what its hash says is refused.
"""

from __future__ import annotations

import hashlib
import os
import random
import re
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from rankscope._files import cache_folder
from rankscope.errors import InputError, LoadError
from rankscope.models.weight_files.files import Traffic, WeightFile, bytes_at

VARIABLE = "RANKSCOPE_KEEP_GIB"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RANGE = re.compile(r"(\d{1,18}) (\d{1,18})\n")
_PIECE = 1 << 23
_SAMPLE = 1 << 12
_BETWEEN_SAMPLES = 1 << 22
_SAMPLES = random.SystemRandom()
_hashed_here: set[tuple[str, int, int, int]] = set()
"""Whole files whose hash this process has computed: name, inode, size and time of the last change."""


def kept_file(file: WeightFile, sha256: str, traffic: Traffic) -> WeightFile:
    """A file that is read once for all models that have it; the file itself if nothing is kept.

    Args:
        file: the file on its server.
        sha256: its hash, as the server states it.
        traffic: counts what is not read again.

    Raises:
        InputError: the size in the environment is not a number.
    """
    given = os.environ.get(VARIABLE, "")
    if not given or not hasattr(os, "preadv") or not _SHA256.fullmatch(sha256):
        return file
    try:
        limit = int(float(given) * 2**30)
    except (ValueError, OverflowError) as error:
        raise InputError(f"{VARIABLE}={given!r:.40} is not a number of GiB. Set it to one, such as 50.") from error
    folder = cache_folder() / "weights"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{folder} cannot be made a folder ({error.strerror}). Set RANKSCOPE_CACHE.") from error
    return _KeptFile(file, _Entry(folder, sha256, file.size, limit), traffic)


class _KeptFile:
    """A file of a server, and its content in the cache.

    Args:
        file: the file on its server.
        entry: its place in the cache.
        traffic: counts what is not read again.
    """

    is_remote = True

    def __init__(self, file: WeightFile, entry: _Entry, traffic: Traffic) -> None:
        self._file, self._entry, self._traffic = file, entry, traffic
        self.name, self.size = file.name, file.size
        self._lock = threading.Lock()
        self._looked = False
        self._whole: _Whole | None = None
        self._unchecked = _BETWEEN_SAMPLES

    @property
    def identity(self) -> str:
        """That of the file on its server."""
        return self._file.identity

    def fetch(self, offset: int, count: int) -> None:
        """There is nobody to advise."""

    def read(self, offset: int, places: Sequence[memoryview]) -> None:
        """Fill ``places`` from the cache, or from the server and into the cache.

        The header, at the beginning, is always read from the server.
        """
        count = sum(map(len, places))
        whole = self._found() if offset else None
        if whole is None:
            self._file.read(offset, places)
            self._entry.write(offset, places)
            return
        whole.read(offset, places)
        self._compare(whole, offset, count)
        self._traffic.count_shared(count)

    def _found(self) -> _Whole | None:
        """The verified content, made complete now if enough of it is there."""
        with self._lock:
            if not self._looked:
                self._looked = True
                self._whole = self._entry.whole() or self._entry.completed(self._file)
            return self._whole

    def _compare(self, whole: _Whole, offset: int, count: int) -> None:
        with self._lock:
            self._unchecked += count
            if self._unchecked < _BETWEEN_SAMPLES:
                return
            self._unchecked = 0
        size = min(count, _SAMPLE)
        start = offset + _SAMPLES.randrange(count - size + 1)
        here = bytearray(size)
        whole.read(start, [memoryview(here)])
        if bytes_at(self._file, start, size) != bytes(here):
            raise LoadError(
                f"{self.name} is not the file that its SHA-256 names: bytes {start} to {start + size - 1} differ from "
                f"content with the hash {self._entry.sha256[:12]}. The server states a wrong hash or sends wrong "
                f"bytes; report it to whoever runs it. To read the file as it is, unset {VARIABLE}."
            )


class _Whole:
    """A file of the cache through an open handle, so that it may be removed meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path, self._handle = path, os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._handle)

    @property
    def facts(self) -> os.stat_result:
        """Of the file behind the handle, whatever has its name now."""
        return os.fstat(self._handle)

    def read(self, offset: int, places: Sequence[memoryview]) -> None:
        """Fill ``places`` from ``offset``."""
        for place in places:
            done = 0
            while done < len(place):
                count = os.preadv(self._handle, [place[done:]], offset + done)
                if not count:
                    raise LoadError(f"{self.path} was cut while it was being read. Remove it and run again.")
                done += count
            offset += len(place)

    def sha256(self) -> str:
        """The hash of its content."""
        digest = hashlib.sha256()
        size = self.facts.st_size
        for offset in range(0, size, _PIECE):
            piece = bytearray(min(_PIECE, size - offset))
            self.read(offset, [memoryview(piece)])
            digest.update(piece)
        return digest.hexdigest()


class _Entry:
    """What the cache has of the content with one hash.

    ::

        HASH           all of it; its hash was computed before it got this name
        HASH.part      the ranges that were read, at their places
        HASH.ranges    one line per range: offset and number of bytes, written after the bytes

    Several processes may write to one entry: ranges that do not belong together give a whole with another hash.

    Args:
        folder: the cache.
        sha256: the hash.
        size: number of bytes of the whole.
        limit: the largest size of the cache.
    """

    def __init__(self, folder: Path, sha256: str, size: int, limit: int) -> None:
        self.sha256, self._size, self._limit, self._folder = sha256, size, limit, folder
        self._path, self._part, self._log = (folder / f"{sha256}{end}" for end in ("", ".part", ".ranges"))
        self._opened = time.time()
        self._was_begun = self._log.exists()
        self._is_refused = False

    def whole(self) -> _Whole | None:
        """The whole content if it is there; hashed once by each process, because disks and people change files."""
        try:
            whole = _Whole(self._path)
        except OSError:
            return None
        facts = whole.facts
        seen = (str(self._path), facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if seen not in _hashed_here:
            if facts.st_size != self._size or whole.sha256() != self.sha256:
                self._path.unlink(missing_ok=True)
                return None
            _hashed_here.add(seen)
        return whole

    def completed(self, file: WeightFile) -> _Whole | None:
        """The whole content, after reading what is missing; None if it is not worth it, or if it has another hash.

        It is worth it if another model has begun it and no more bytes are missing than were read so far: at most twice
        what is needed is read then, whatever comes.
        """
        ranges = self._ranges()
        held = list(_union(ranges))
        missing = self._size - sum(end - start for start, end in held)
        if (
            not self._was_begun
            or not held
            or missing > sum(end - start for start, end in ranges)
            or not self._has_room(self._size)
        ):
            return None
        handle, name = tempfile.mkstemp(dir=self._folder, prefix=f"{self.sha256}.")
        try:
            with os.fdopen(handle, "wb") as out, self._part.open("rb") as part:
                digest = hashlib.sha256()
                for piece in self._pieces(held, part, file):
                    digest.update(piece)
                    out.write(piece)
            if digest.hexdigest() == self.sha256:
                os.replace(name, self._path)
            self._is_refused = digest.hexdigest() != self.sha256
            self._part.unlink(missing_ok=True)
            self._log.unlink(missing_ok=True)
        except OSError:  # a full disk, or another process has removed the parts
            return None
        finally:
            Path(name).unlink(missing_ok=True)
        return self.whole()

    def write(self, offset: int, places: Sequence[memoryview]) -> None:
        """Keep a range that was read, if there is room; without room or with a full disk, nothing is kept."""
        count = sum(map(len, places))
        try:
            if self._path.exists():
                os.utime(self._path, ns=(time.time_ns(), self._path.stat().st_mtime_ns))  # in use, so not removed
                return
            if self._is_refused or not count or not self._has_room(count):
                return
            self._part.touch(mode=0o600)
            with self._part.open("r+b", buffering=0) as part:
                at = offset
                for place in places:
                    at += os.pwrite(part.fileno(), place, at)
            if at == offset + count:
                with self._log.open("a", encoding="ascii") as log:
                    log.write(f"{offset} {count}\n")
        except OSError:
            self._is_refused = True

    def _ranges(self) -> list[tuple[int, int]]:
        """First byte and end of each range that was kept, in the order in which they came."""
        try:
            text = self._log.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError):
            return []
        ranges = [(int(match[1]), int(match[1]) + int(match[2])) for match in _RANGE.finditer(text)]
        return [(start, end) for start, end in ranges if end <= self._size]

    def _pieces(self, held: Sequence[tuple[int, int]], part: BinaryIO, file: WeightFile) -> Iterator[bytes]:
        """The whole content in order: what is there, and between it what is read now."""
        done = 0
        for start, end in [*held, (self._size, self._size)]:
            for offset in range(done, start, _PIECE):
                yield bytes_at(file, offset, min(_PIECE, start - offset))
            for offset in range(start, end, _PIECE):
                yield os.pread(part.fileno(), min(_PIECE, end - offset), offset)
            done = end

    def _has_room(self, count: int) -> bool:
        """Whether ``count`` more bytes fit, after removing what was not used since the model was opened.

        What the model itself has stays, because its headers were read first: removing the beginning of a model for its
        end would help nobody, because the next copy reads in the same order.
        """
        files = []
        for path in self._folder.iterdir():
            with suppress(OSError):  # removed meanwhile
                facts = path.stat()
                files.append((max(facts.st_atime, facts.st_mtime), facts.st_blocks * 512, path))
        left = self._limit - count - sum(size for _, size, _ in files)
        for used, size, path in sorted(files):
            if left >= 0 or used >= self._opened:
                break
            if path.name.startswith(self.sha256):
                continue
            if path.suffix == ".part":  # ranges of it would be zeros
                path.with_suffix(".ranges").unlink(missing_ok=True)
            path.unlink(missing_ok=True)
            left += size
        return left >= 0


def _union(ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The same bytes as ranges in order that do not overlap."""
    done = 0
    for start, end in sorted(ranges):
        if end > done:
            yield max(start, done), end
            done = end
