"""Bytes of tensors alive at once: a storage made under the mode counts until its last tensor dies."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """``peak`` is the largest sum of storages made inside and alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self._holders: Counter[int] = Counter()
        self._sizes: dict[int, int] = {}
        self.now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {given.untyped_storage().data_ptr() for given in _with_storage((args, kwargs))}
        for made in _with_storage(out):
            self._hold(made, before)
        return out

    def _hold(self, made: torch.Tensor, before: set[int]) -> None:
        storage = made.untyped_storage()
        place = storage.data_ptr()
        if place in before and place not in self._holders:
            return
        if place not in self._holders:
            self._sizes[place] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
        self._holders[place] += 1
        weakref.finalize(made, self._release, place)

    def _release(self, place: int) -> None:
        self._holders[place] -= 1
        if self._holders[place] == 0:
            del self._holders[place]
            self.now -= self._sizes.pop(place)


def _with_storage(tree: Any) -> list[torch.Tensor]:
    """Tensors that hold memory; a derivative known to be zero has none."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and not leaf._is_zerotensor()]
