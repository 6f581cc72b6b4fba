"""Batches in files: ``.pt`` (tensors only), ``.npy``, ``.npz``, ``.safetensors``, or an object of the user's code."""

from __future__ import annotations

import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from rankscope._types import is_named
from rankscope.errors import InputError
from rankscope.models.loading.named import named_object

TENSOR_FILES = (".pt", ".pth", ".npy", ".npz", ".safetensors")
LARGEST_BATCH = 2**32
LARGEST_UNPACKED, MOST_PER_BYTE = 2**28, 16
"""An archive may unpack to so many bytes, or if it is larger, to so many times its size."""
"""Bytes that a file of tensors may unpack to: few bytes can stand for many, compressed or as one number repeated."""


def opened(given: Any) -> Any:
    """What a path to a batch holds; anything else as it is.

    A path with another ending is left to be read as text.

    Raises:
        InputError: the file cannot be read, or holds something other than tensors.
    """
    if not isinstance(given, Path):
        return given
    if is_named(str(given)):
        return named_object(str(given))
    if given.suffix not in TENSOR_FILES:
        return given
    content = tensors_in(given)
    if isinstance(content, Mapping) and len(content) == 1:
        (content,) = content.values()
    return content


def tensors_in(path: Path) -> Any:
    """What a file of tensors holds.

    Raises:
        InputError: there is no such file, or it cannot be read.
    """
    if not path.is_file():
        raise InputError(f"There is no file {path}." if not path.exists() else f"{path} is not a regular file.")
    try:
        return _read(path)
    except InputError:
        raise
    except Exception as error:  # noqa: BLE001  (each format has errors of its own)
        raise InputError(f"{path} cannot be read as tensors: {' '.join(str(error).split())[:200]}") from None


def _read(path: Path) -> Any:
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            limit = max(LARGEST_UNPACKED, MOST_PER_BYTE * path.stat().st_size)
            _check_size(path, (member.file_size for member in archive.infolist()), min(limit, LARGEST_BATCH))
    if path.suffix in (".pt", ".pth"):
        content = torch.load(path, map_location="cpu", weights_only=True)
    elif path.suffix == ".safetensors":
        from safetensors.torch import load_file

        content = load_file(path)
    else:
        with path.open("rb") as stream:
            loaded = np.load(stream, allow_pickle=False)
            content = {name: torch.from_numpy(loaded[name]) for name in loaded} if path.suffix == ".npz" else (
                torch.from_numpy(loaded)
            )  # fmt: skip
    tensors = pytree.tree_leaves(content)
    _check_size(path, (each.numel() * each.element_size() for each in tensors if isinstance(each, torch.Tensor)))
    return content


def _check_size(path: Path, sizes: Iterable[int], limit: int = LARGEST_BATCH) -> None:
    size = sum(sizes)
    if size > limit:
        raise InputError(
            f"{path} unpacks to {size:,} bytes, and a file of tensors of its size may hold {limit:,}. Save fewer "
            "sequences."
        )
