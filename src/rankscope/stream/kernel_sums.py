"""What a fused attention kernel knows of its rows and tells nobody: the logarithm of each row's sum of exponentials.

PyTorch's kernel for processors returns it beside its output, for a backward pass. With it the probabilities of any tile
follow from queries and keys alone, which saves one walk over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_WORTH_ENTRIES = 1 << 20


class KernelSums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks on while one fused call runs; the call itself runs as it would.

    Attributes:
        log_sums: ``(batch, heads, query)``, of the one kernel that ran; None where there was none, or several.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: list[Tensor] = []

    @property
    def log_sums(self) -> Tensor | None:
        """What the kernel told."""
        return self._found[0] if len(self._found) == 1 else None

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is _KERNEL:
            self._found.append(out[1])
        return out


def watching_kernel(query: Tensor, key: Tensor) -> AbstractContextManager[KernelSums | None]:
    """Look on where it is worth it: at long sequences of plain tensors on a processor."""
    plain = type(query) is Tensor and type(key) is Tensor
    if not plain or query.device.type != "cpu":
        return nullcontext()
    entries = query.shape[:-1].numel() * key.shape[-2]
    return KernelSums() if entries >= _WORTH_ENTRIES else nullcontext()
