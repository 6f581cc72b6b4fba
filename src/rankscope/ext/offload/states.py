"""The residual streams of all batches between two blocks: in memory, in files, or both."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankscope._files import sha256_of
from rankscope.errors import ResultError
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.exact_arithmetic.terms import Term
from rankscope.models.weight_files.tensors import StoredTensor, read_header, read_metadata

Key = tuple[str, int]
"""Variant key (the network a stream belongs to) and number of the first sequence of the batch."""
_START_ANEW = "The states before it are gone, so this run cannot resume: remove {} and start it again."


class StateStore:
    """The state of each residual stream after the last block; a block reads one generation and writes the next.

    Args:
        folder: states are written here; None keeps them in memory only.
        in_memory: also keep them in memory, and read them from there.
        durable: flush each file to disk before its hash counts, for a folder that another process may resume from.

    Attributes:
        hashes: SHA-256 of each file of the last finished generation, by name; what is read is compared with them.
    """

    def __init__(self, folder: Path | None, *, in_memory: bool, durable: bool = False) -> None:
        self._folder = folder
        self._in_memory = in_memory or folder is None
        self._held: dict[Key, Any] = {}
        self._coming: dict[Key, Any] = {}
        self._generation = 0
        self._durable = durable
        self.hashes: Mapping[str, str] = {}
        self._coming_hashes: dict[str, str] = {}

    def resume(self, generation: int, hashes: Mapping[str, str]) -> None:
        """Resume after that many finished stages, from files with these hashes."""
        self._generation, self.hashes = generation, hashes

    def take(self, key: Key, *, again: bool = False) -> Any:
        """The state from which a block starts; ``again`` if it will be needed once more."""
        if key in self._held:
            # Popped as it is used, so that old and new states of all batches do not add up more than necessary.
            return self._held[key] if again else self._held.pop(key)
        path = self._path(self._generation - 1, key)
        _refuse_changed(path, self.hashes.get(path.name))
        return read_state(path)

    def put(self, key: Key, state: Any) -> None:
        """Store the output of a block."""
        if self._in_memory:
            self._coming[key] = state
        if self._folder is not None:
            path = self._path(self._generation, key)
            self._coming_hashes[path.name] = write_state(path, state, durable=self._durable)

    def advance(self) -> None:
        """The block is finished: the next one starts from its outputs."""
        self._held, self._coming = self._coming, {}
        self.hashes, self._coming_hashes = self._coming_hashes, {}
        self._generation += 1

    def forget_before(self) -> None:
        """Remove the files that no later stage reads."""
        if self._folder is None:
            return
        kept = f"state-{self._generation - 1:05d}-"
        for path in self._folder.glob("state-*.safetensors"):
            if not path.name.startswith(kept):
                path.unlink(missing_ok=True)

    def _path(self, generation: int, key: Key) -> Path:
        assert self._folder is not None
        variant = hashlib.sha256(key[0].encode()).hexdigest()[:12]
        return self._folder / f"state-{generation:05d}-{variant}-{key[1]}.safetensors"


def write_state(path: Path, state: Any, *, durable: bool = False) -> str:
    """Write tensors, or tuples, lists and dictionaries of tensors, with their strides; atomic.

    Args:
        path: of the file.
        state: what to write.
        durable: flush the file to disk before it gets its name.

    Returns:
        SHA-256 of the file.

    Raises:
        ResultError: it could not be written; usually the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    described = json.dumps(_described(state, tensors))
    partial = path.with_suffix(".partial")
    try:
        save_file(tensors, str(partial), metadata={"state": described})
        digest = sha256_of(partial)
        if durable:
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise ResultError(
            f"{path} could not be written ({error}). Free some space and start the run again; with --work it resumes "
            "after the last finished block."
        ) from error
    return digest


def _refuse_changed(path: Path, digest: str | None) -> None:
    try:
        digest_now = sha256_of(path)
    except OSError as error:
        raise ResultError(f"{path} cannot be read ({error.strerror}). {_START_ANEW.format(path.parent)}") from error
    if digest_now != digest:
        raise ResultError(
            f"{path} was changed after it was written: its hash differs. {_START_ANEW.format(path.parent)}"
        )


def read_state(path: Path) -> Any:
    """Read what :func:`write_state` wrote: the same values with the same strides, so that the same kernels run.

    Raises:
        ResultError: the file was not written by :func:`write_state`.
    """
    try:
        return _rebuilt(json.loads(read_metadata(path)["state"]), read_header(path))
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise ResultError(
            f"{path} is not a stored residual stream ({error!r}). {_START_ANEW.format(path.parent)}"
        ) from error


def _described(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, Deviation):
        return {
            "kind": "deviation",
            "base": _described(tree.base, tensors),
            "terms": [[term.log_scale, _described(term.values, tensors)] for term in tree.terms],
            "shape": list(tree.shape),
            "null_axis": tree.null_axis,
            "base_sum": tree.base_sum,
        }
    if isinstance(tree, Tensor):
        name = f"t{len(tensors)}"
        # Save the memory between the first and the last entry, gaps included: safetensors stores contiguous tensors
        # only, and a contiguous copy could make other kernels run, with other last digits.
        span = 1 + sum((size - 1) * stride for size, stride in zip(tree.shape, tree.stride(), strict=True))
        flat = tree.detach().as_strided((span if tree.numel() else 0,), (1,))
        tensors[name] = flat.clone()
        return {"kind": "tensor", "name": name, "size": list(tree.shape), "stride": list(tree.stride())}
    if isinstance(tree, (tuple, list)):
        return {"kind": type(tree).__name__, "items": [_described(item, tensors) for item in tree]}
    if isinstance(tree, dict):
        return {"kind": "dict", "items": {name: _described(item, tensors) for name, item in tree.items()}}
    return {"kind": "plain", "value": tree}


def _rebuilt(facts: Any, stored: Mapping[str, StoredTensor]) -> Any:
    kind = facts["kind"]
    if kind == "tensor":
        entry = stored[facts["name"]]
        flat = torch.empty(entry.shape, dtype=entry.dtype)
        entry.read_into(flat)
        return flat.as_strided(facts["size"], facts["stride"])
    if kind == "deviation":
        terms = [Term(float(scale), _rebuilt(values, stored)) for scale, values in facts["terms"]]
        base = _rebuilt(facts["base"], stored)
        return Deviation(base, terms, facts["shape"], null_axis=facts["null_axis"], base_sum=facts["base_sum"])
    if kind == "dict":
        return {name: _rebuilt(item, stored) for name, item in facts["items"].items()}
    if kind in ("tuple", "list"):
        items = [_rebuilt(item, stored) for item in facts["items"]]
        return tuple(items) if kind == "tuple" else items
    return facts["value"]
