"""Which module runs while operations are seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode


class ModuleFollower(TorchFunctionMode):
    """Sees the operations of a pass and knows the innermost module that runs.

    Args:
        model: whose modules are named.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._names = {module: name for name, module in model.named_modules()}
        self._inside: list[str | None] = []

    @property
    def innermost(self) -> str | None:
        """Name of the module that runs; None outside the modules of the model."""
        return self._inside[-1] if self._inside else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow one pass."""
        begin = register_module_forward_pre_hook(lambda module, _: self._inside.append(self._names.get(module)))
        end = register_module_forward_hook(lambda *_: self._ended(), always_call=True)
        try:
            with self:
                yield
        finally:
            begin.remove()
            end.remove()

    def _ended(self) -> None:
        self._inside.pop()
