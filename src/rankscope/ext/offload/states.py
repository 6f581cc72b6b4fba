"""The residual streams of all batches between two blocks: in memory, or in files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rankscope.errors import ResultError
from rankscope.exact_arithmetic.tensor import Deviation
from rankscope.exact_arithmetic.terms import Term
from rankscope.models.weight_files.tensors import StoredTensor, read_header, read_metadata

Key = tuple[str, int]
"""Variant key (the network a stream belongs to) and number of the first sequence of the batch."""


class StateStore:
    """The state of each residual stream after the last block; a block reads one generation and writes the next.

    Args:
        folder: states are written here; None keeps them in memory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._states: dict[Key, Any] = {}
        self._coming: dict[Key, Any] = {}
        self._generation = 0

    def take(self, key: Key, *, again: bool = False) -> Any:
        """The state from which a block starts; ``again`` if it will be needed once more."""
        if self._folder is None:
            # Popped as it is used, so that old and new states of all batches do not add up more than necessary.
            return self._states[key] if again else self._states.pop(key)
        return read_state(self._path(self._generation - 1, key))

    def put(self, key: Key, state: Any) -> None:
        """Store the output of a block."""
        if self._folder is None:
            self._coming[key] = state
        else:
            write_state(self._path(self._generation, key), state)

    def advance(self) -> None:
        """The block is finished: the next one starts from its outputs, and those before it are removed."""
        self._states, self._coming = self._coming, {}
        self._generation += 1
        if self._folder is not None:
            kept = f"state-{self._generation - 1:05d}-"
            for path in self._folder.glob("state-*.safetensors"):
                if not path.name.startswith(kept):
                    path.unlink(missing_ok=True)

    def _path(self, generation: int, key: Key) -> Path:
        assert self._folder is not None
        variant = hashlib.sha256(key[0].encode()).hexdigest()[:12]
        return self._folder / f"state-{generation:05d}-{variant}-{key[1]}.safetensors"


def write_state(path: Path, state: Any) -> None:
    """Write tensors, or tuples, lists and dictionaries of tensors, with their strides.

    Raises:
        ResultError: it could not be written; usually the disk is full.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    described = json.dumps(_described(state, tensors))
    try:
        save_file(tensors, str(path), metadata={"state": described})
    except (OSError, SafetensorError) as error:
        raise ResultError(f"{path} could not be written ({error}). Free some space and start the run again.") from error


def read_state(path: Path) -> Any:
    """Read what :func:`write_state` wrote: the same values with the same strides, so that the same kernels run.

    Raises:
        ResultError: the file was not written by :func:`write_state`.
    """
    try:
        return _rebuilt(json.loads(read_metadata(path)["state"]), read_header(path))
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise ResultError(f"{path} is not a stored residual stream ({error!r}). Start the run again.") from error


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
