"""Arrays of hidden states: in memory, in a safetensors file or in an npz file. Files are not trusted.

Nothing is unpickled. Headers are checked here, and a layer is read with plain reads, so that a set of hidden states
larger than memory costs no more than one layer. A memory map would count every touched page as resident.
"""

from __future__ import annotations

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rankscope._files import open_regular
from rankscope._headers import read_npy_header
from rankscope._types import kind_of
from rankscope.errors import InputError, LoadError
from rankscope.models.weight_files.files import LocalFile
from rankscope.models.weight_files.tensors import WORDS, StoredTensor, read_header

ENDINGS = (".safetensors", ".npz")
MOST_ARRAYS = 10_000
LONGEST_NPY_HEADER = 1 << 16
LARGEST_PACKED = 1 << 30
"""Largest compressed array that is unpacked into memory."""
NARROW_READ = 512
"""If one layer is scattered over pieces shorter than this many bytes, the whole array is read at once."""
_FROM_NUMPY: Mapping[str, torch.dtype] = {
    "<f8": torch.float64,
    "<f4": torch.float32,
    "<f2": torch.float16,
    "<i8": torch.int64,
    "<i4": torch.int32,
    "|u1": torch.uint8,
    "|b1": torch.bool,
}
_LOCAL_HEADER = struct.Struct("<4s22sHH")


@dataclass(frozen=True)
class Packed:
    """A compressed array of an npz file; it is unpacked on every read."""

    path: Path
    member: str
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        """All of it."""
        try:
            with zipfile.ZipFile(self.path) as archive:
                content = bytearray(archive.read(self.member))
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError) as error:
            raise LoadError(f"{self.path}: {self.member} is damaged ({error}). Save it again.") from error
        count = math.prod(self.shape)
        return torch.frombuffer(content, dtype=self.dtype, count=count, offset=self.start).reshape(self.shape)


Array = Tensor | StoredTensor | Packed
"""An array whose data may still be on disk."""


def whole(array: Array) -> Tensor:
    """All of an array."""
    if isinstance(array, Packed):
        return array.read()
    if isinstance(array, StoredTensor):
        place = torch.empty(array.shape, dtype=array.dtype)
        array.read_into(place)
        return place
    return array


def arrays_in(path: Path, *, bfloat16: bool) -> dict[str, Array]:
    """The arrays of a file by name; only headers are read.

    Args:
        path: a ``.safetensors`` or ``.npz`` file.
        bfloat16: numpy writes bfloat16 as two bytes without a meaning; read these as bfloat16.

    Raises:
        LoadError: the file is damaged, or was not written as one of the two.
    """
    if not path.is_file():
        raise LoadError(f"There is no file {str(path)!r} with hidden states.")
    if path.suffix == ".safetensors":
        arrays: dict[str, Array] = {**read_header(path)}
    elif path.suffix == ".npz":
        arrays = _npz(path, bfloat16)
    else:
        raise LoadError(
            f"{path} is not a {' or '.join(ENDINGS)} file. Save hidden states with safetensors.torch.save_file, or "
            "numpy.savez; pickled files (.pt, .npy of objects) are not read."
        )
    if len(arrays) > MOST_ARRAYS:
        raise LoadError(f"{path} has {len(arrays):,} arrays; at most {MOST_ARRAYS:,} are read.")
    return arrays


def _npz(path: Path, bfloat16: bool) -> dict[str, Array]:
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            if len(members) > MOST_ARRAYS:
                raise ValueError(f"it has {len(members):,} arrays; at most {MOST_ARRAYS:,} are read")
            names = [member.filename for member in members]
            if len(set(names)) < len(names):
                raise ValueError("two of its arrays have the same name")
            return {
                member.filename.removesuffix(".npy"): _member(path, file, archive, member, bfloat16)
                for member in members
            }
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError) as error:
        raise LoadError(f"{path} cannot be read as .npz: {error}.") from error
    except OSError as error:
        raise LoadError(f"{path} could not be read: {error.strerror}.") from error


def _member(path: Path, file: Any, archive: zipfile.ZipFile, member: zipfile.ZipInfo, bfloat16: bool) -> Array:
    name = member.filename
    if not name.endswith(".npy") or member.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise ValueError(f"{name!r} is not an array as numpy.savez and numpy.savez_compressed write it")
    with archive.open(member) as stream:
        head = io.BytesIO(stream.read(LONGEST_NPY_HEADER))
    shape, fortran, dtype = read_npy_header(head)
    kind = torch.bfloat16 if bfloat16 and dtype.str == "|V2" else _FROM_NUMPY.get(dtype.str)
    if kind is None:
        raw = "; numpy writes bfloat16 so: pass computed_in='bfloat16', or save float32" if dtype.str == "|V2" else ""
        raise ValueError(f"{name!r} holds {dtype} ({dtype.str}), and numbers in this machine's order are read{raw}")
    if fortran and len(shape) > 1:
        raise ValueError(f"{name!r} is in Fortran order; save numpy.ascontiguousarray of it")
    if min(shape, default=0) < 0 or head.tell() + math.prod(shape) * kind.itemsize != member.file_size:
        raise ValueError(f"{name!r} promises {shape} of {dtype}, which is not the size of its data")
    if member.compress_type == zipfile.ZIP_STORED:
        start = _start_of(file, member) + head.tell()
        if start + math.prod(shape) * kind.itemsize > path.stat().st_size:
            raise ValueError(f"{name!r} ends after the end of the file")
        return StoredTensor(LocalFile(path), start, shape, WORDS[kind])
    if member.file_size > LARGEST_PACKED:
        raise ValueError(
            f"{name!r} unpacks to {member.file_size:,} bytes, more than {LARGEST_PACKED:,}; save it with numpy.savez, "
            "which does not compress, or one array per layer"
        )
    return Packed(path, name, head.tell(), shape, kind)


def _start_of(file: Any, member: zipfile.ZipInfo) -> int:
    """Where the data of an uncompressed member begin: its local header repeats the name and has extra bytes."""
    file.seek(member.header_offset)
    raw = file.read(_LOCAL_HEADER.size)
    if len(raw) < _LOCAL_HEADER.size or raw[:4] != b"PK\x03\x04":
        raise ValueError(f"the header of {member.filename!r} is missing")
    _, _, name, extra = _LOCAL_HEADER.unpack(raw)
    return int(member.header_offset + _LOCAL_HEADER.size + name + extra)


def array_of(given: object, name: str) -> Tensor:
    """An array of the caller's: a torch tensor, a numpy array, or one of another library through DLPack.

    Raises:
        InputError: anything else.
    """
    if isinstance(given, Tensor):
        return given.detach()
    if isinstance(given, np.ndarray):
        if given.dtype.str == "|V2" or given.dtype.kind not in "fiub":
            raise InputError(f"{name} is a numpy array of {given.dtype}; expected floating-point numbers.")
        return torch.from_numpy(np.array(given) if not given.flags.writeable else given)
    if hasattr(given, "__dlpack__"):
        try:
            return torch.from_dlpack(given)  # type: ignore[attr-defined]
        except (BufferError, RuntimeError, TypeError) as error:
            raise InputError(
                f"{name} is {kind_of(given)}, which torch cannot read through DLPack ({error}). Convert it to numpy."
            ) from error
    raise InputError(
        f"{name} is {kind_of(given)}; expected an array: torch, numpy, or one with __dlpack__ such as JAX's."
    )
