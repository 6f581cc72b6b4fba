"""The base of modes that see kernels, after autograd and composite operations were resolved."""

from __future__ import annotations

import sys

from torch.utils._python_dispatch import TorchDispatchMode


class KernelMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that does not import ``torch._dynamo``, which takes seconds, unless it is imported already.

    Recent releases wrap ``__torch_dispatch__`` of each subclass so that the compiler skips it. Modes here run models
    uncompiled.
    """

    supports_higher_order_operators = True
    """``flex_attention``, ``cond``, ``scan`` and their like are shown as one call, as any operator is."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return "torch._dynamo" in sys.modules
